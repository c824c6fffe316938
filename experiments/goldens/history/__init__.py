"""A small repository whose training is gated by a golden, and changes that arrive one by one."""
