"""Exposures: what a unit's modules register as parameters, sharded and unsharded, for each API and layout.

What is registered depends on the API here and nowhere else. There are four exposures:

- `FlatExposure`: FSDP1 with `use_orig_params=False`. The module has one `FlatParameter`, which is the shard.
- `OriginalExposure`: FSDP1 with `use_orig_params=True`. The original parameters; sharded, each is this rank's piece.
- `DTensorExposure`: FSDP2. Sharded, a DTensor parameter; unsharded, the full leaf.
- `PieceExposure`: FSDP2 over a flat or ragged layout. Sharded, a PieceTensor.

While a unit computes, its modules' attributes yield aliases of the full leaves: see [Note: anchors] in engine/_anchor.py. They
are put into the instances' `__dict__`, which attribute lookup reads before `_parameters`. What is registered meanwhile are the
full leaves, or the flat parameter.
"""

from torch_backend.exposure._dtensor import DTensorExposure
from torch_backend.exposure._flat import FlatExposure, FlatParameter
from torch_backend.exposure._original import OriginalExposure
from torch_backend.exposure._pieces import PieceExposure
from torch_backend.exposure._protocol import Exposure

__all__ = ["DTensorExposure", "Exposure", "FlatExposure", "FlatParameter", "OriginalExposure", "PieceExposure"]
