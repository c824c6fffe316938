"""The memory of a unit: its shard, its unsharded parameters, its gradients, and the streams that fill and free it."""
