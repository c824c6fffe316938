"""The training step of sharded modules, shared by both APIs: units, buckets, hooks that drive the step machine, clipping."""
