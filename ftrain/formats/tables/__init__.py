"""Tables: .csv, .tsv, .jsonl and .npz files, and their conversion to records of Examples and back."""
