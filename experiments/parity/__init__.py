"""Parity runs: the same training recorded in torch and in JAX, as separate processes that meet only on disk."""
