"""State dicts and checkpoints of sharded modules and of their optimizers (R36, R37)."""
