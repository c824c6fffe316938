"""A small repository whose training is gated by a golden, and twenty changes that arrive one by one."""
