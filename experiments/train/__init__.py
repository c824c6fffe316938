"""What training runs share: settings, the sharded model, checkpoints, metrics, resuming, and processes of ranks."""
