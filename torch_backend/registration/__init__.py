"""Registrars: what a unit's modules register as parameters, sharded and unsharded, for each API and layout.

What is registered depends on the API here and nowhere else. There are four registrars:

- `FlatRegistrar`: FSDP1 with `use_orig_params=False`. The module has one `FlatParameter`, which is the shard.
- `OriginalRegistrar`: FSDP1 with `use_orig_params=True`. The original parameters; sharded, each is this rank's piece.
- `DTensorRegistrar`: FSDP2. Sharded, a DTensor parameter; unsharded, the full leaf.
- `PieceRegistrar`: FSDP2 over a flat or ragged layout. Sharded, a PieceTensor.

While a unit computes, its modules' attributes yield aliases of the full leaves: see [Note: anchors] in engine/_anchor.py. They
are put into the instances' `__dict__`, which attribute lookup reads before `_parameters`. What is registered meanwhile are the
full leaves, or the flat parameter.
"""

from torch_backend.registration._dtensor import DTensorRegistrar
from torch_backend.registration._flat import FlatParameter, FlatRegistrar
from torch_backend.registration._original import OriginalRegistrar
from torch_backend.registration._pieces import PieceRegistrar
from torch_backend.registration._protocol import Registrar

__all__ = ["DTensorRegistrar", "FlatParameter", "FlatRegistrar", "OriginalRegistrar", "PieceRegistrar", "Registrar"]
