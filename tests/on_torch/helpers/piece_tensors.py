"""Optimizers that are elementwise, and tensors as pieces and in full."""

from typing import Any

import torch
from torch import Tensor

from crossframe.params import ParamSpec
from tests.on_torch.helpers.layouts import locations_of, mesh_of
from torch_backend.compat._dtypes import dtype_name
from torch_backend.pieces._piece_tensor import PieceTensor

# A rank holds the end of one parameter and the start of the next; one has fewer elements than there are ranks, one none.
SHAPES = ((5, 3), (7,), (1,), (0, 4), (4, 2, 3), (3, 17))


def full_tensors(seed: int, dtype: torch.dtype = torch.float64, shapes: Any = SHAPES) -> list[Tensor]:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def pieces_of(kind: str, full: list[Tensor], mesh: Any = None) -> list[PieceTensor]:
    """These tensors under a layout by itself."""
    mesh = mesh_of(torch.distributed.get_world_size()) if mesh is None else mesh
    specs = [ParamSpec(f"p{i}", tuple(t.shape), dtype_name(t.dtype)) for i, t in enumerate(full)]
    store, locations = locations_of(kind, specs, full, mesh)
    return [PieceTensor(piece, location) for piece, location in zip(store.pieces, locations, strict=True)]


def like(pieces: list[PieceTensor], full: list[Tensor]) -> list[Tensor]:
    """Other values, cut as `pieces` are."""
    return [piece.detach().clone().copy_(value) for piece, value in zip(pieces, full, strict=True)]


ELEMENTWISE: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Adam", {"weight_decay": 0.1, "amsgrad": True}),
    ("AdamW", {}),
    ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("RAdam", {"weight_decay": 0.1}),
    ("Adamax", {"weight_decay": 0.1}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.2}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Rprop", {}),
    ("ASGD", {"t0": 1, "weight_decay": 0.1}),
    ("Adadelta", {"weight_decay": 0.1}),
]


HOW: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]


FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}
