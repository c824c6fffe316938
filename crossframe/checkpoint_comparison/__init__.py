"""Compares two stored models tensor by tensor: which differ, and how.

`open_stored` opens a checkpoint of this project, safetensors files, or one that a backend has unpacked (`unpacked.py`).
`compare_checkpoints` gives the verdict.
"""

from crossframe.checkpoint_comparison.compare import CheckpointVerdict, compare_checkpoints
from crossframe.checkpoint_comparison.stored import Format, StoredModel, format_of, open_stored
from crossframe.checkpoint_comparison.tensors import Kind, TensorDifference
from crossframe.checkpoint_comparison.unpacked import Unpacked, read_unpacked

__all__ = [
    "CheckpointVerdict",
    "Format",
    "Kind",
    "StoredModel",
    "TensorDifference",
    "Unpacked",
    "compare_checkpoints",
    "format_of",
    "open_stored",
    "read_unpacked",
]
