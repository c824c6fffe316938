"""Parameters and optimizer state as checkpoints store them."""
