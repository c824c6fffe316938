"""What `experiments/train_torch.py` is made of: settings, the sharded model, checkpoints, metrics."""
