"""What the commands record, compare, explain and inspect do with recordings of any training script."""
