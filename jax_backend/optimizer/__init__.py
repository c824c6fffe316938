"""optax on sharded parameters."""
