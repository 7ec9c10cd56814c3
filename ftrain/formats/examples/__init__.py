"""Examples and SequenceExamples: messages, and batches of them as arrays, by a spec."""
