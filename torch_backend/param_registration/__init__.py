"""Registrars: what a unit's modules register as parameters, sharded and unsharded, for each API and layout.

Only this folder depends on the API. There are four registrars:

- `FlatRegistrar`: FSDP1 with `use_orig_params=False`. Registers one `FlatParameter`, which is the shard.
- `OriginalRegistrar`: FSDP1 with `use_orig_params=True`. Registers the original parameters, which are this rank's pieces while
  sharded.
- `DTensorRegistrar`: FSDP2. Registers DTensors while sharded and the leaves while unsharded.
- `PieceRegistrar`: FSDP2 with a flat or ragged layout. Registers PieceTensors while sharded.

While a unit computes, its modules' attributes are aliases of the leaves, see [Note: anchors] in engine/_anchor.py. They are set
in the instances' `__dict__`, which attribute lookup reads before `_parameters`. The leaves or the flat parameter stay registered.
"""

from torch_backend.param_registration._dtensor import DTensorRegistrar
from torch_backend.param_registration._flat import FlatParameter, FlatRegistrar
from torch_backend.param_registration._original import OriginalRegistrar
from torch_backend.param_registration._pieces import PieceRegistrar
from torch_backend.param_registration._protocol import Registrar

__all__ = ["DTensorRegistrar", "FlatParameter", "FlatRegistrar", "OriginalRegistrar", "PieceRegistrar", "Registrar"]
