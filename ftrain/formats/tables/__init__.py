"""Tables: .csv, .tsv, .jsonl and .npz files, and their conversion to records and back."""
