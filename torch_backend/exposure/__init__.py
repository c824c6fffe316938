"""What a unit's module shows when: the only place where the two interfaces differ in what is registered.

Four exposures, one a face and mode:

- `FlatExposure`: FSDP1 without original parameters. The module has one `FlatParameter`, which is the shard.
- `OriginalExposure`: FSDP1 with them. The user's own parameters stay registered; sharded, each is the piece held here.
- `DTensorExposure`: FSDP2. Sharded, a DTensor parameter; unsharded, the full leaf.
- `PieceExposure`: FSDP2 over a flat or ragged layout. Sharded, a PieceTensor.

While a unit computes, module attributes yield what it computes with, aliases of the full leaves (see [Note: anchors] in
anchor.py). They are put into the instances' `__dict__`, which attribute lookup reads before `_parameters`, so that what is
registered is another matter: the full leaves, but for a flat parameter.
"""

from torch_backend.exposure.dtensor import DTensorExposure
from torch_backend.exposure.flat import FlatExposure, FlatParameter
from torch_backend.exposure.original import OriginalExposure
from torch_backend.exposure.pieces import PieceExposure
from torch_backend.exposure.protocol import Exposure

__all__ = ["DTensorExposure", "Exposure", "FlatExposure", "FlatParameter", "OriginalExposure", "PieceExposure"]
