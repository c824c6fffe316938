"""PieceTensor, a parameter of a flat or ragged layout on one rank: its operations, and the optimizers that update it."""

# Imported for what they register: hooks that run before an optimizer's first step, in this order, and PieceTensor's operations.
from torch_backend.pieces import _optimizer_probe, _optimizer_state, _piece_ops  # noqa: F401
