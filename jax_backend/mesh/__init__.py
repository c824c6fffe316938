"""The mesh of devices, which is the core's grid of ranks, and shard_map over it."""
