"""TFRecord files: frames, compression, damage, indices, shards."""
