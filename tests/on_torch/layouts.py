"""Models sharded by fully_shard under each of the layouts."""

import inspect
import sys
from typing import Any
from unittest import mock

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from crossframe.layout import FlatLayout, PerParamLayout, RaggedLayout
from torch_backend.collectives import Communicator
from torch_backend.exposure.pieces import PieceExposure
from torch_backend.fully_shard import fully_shard
from torch_backend.piece_place import Place
from torch_backend.redistribute import show_dtensors, take_dtensors
from torch_backend.store import ShardStore

LAYOUTS = ("per_param", "flat", "ragged")


def mesh_of(*sizes: int) -> DeviceMesh:
    """All ranks as a mesh: (shard,) or (replicate, shard)."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])


def layout_of(kind: str, specs: Any, world_size: int) -> Any:
    """A layout of this kind."""
    if kind == "flat":
        return FlatLayout(tuple(specs), world_size, keep_original=True)
    return RaggedLayout(tuple(specs), world_size) if kind == "ragged" else PerParamLayout(tuple(specs), world_size)


def shard(model: nn.Module, layout: str, mesh: DeviceMesh | None = None) -> nn.Module:
    """Every module in `model.blocks`, and the model, as units of their own."""
    mesh = mesh_of(sys.modules["torch.distributed"].get_world_size()) if mesh is None else mesh
    for module in (*getattr(model, "blocks", ()), model):
        if "layout" in inspect.signature(fully_shard).parameters:
            fully_shard(module, mesh=mesh, layout=layout)
        elif layout == "per_param":
            fully_shard(module, mesh=mesh)
        else:
            _shard_in_pieces(module, layout, mesh)
    return model


def _shard_in_pieces(module: nn.Module, layout: str, mesh: DeviceMesh) -> None:
    """What `fully_shard(module, mesh=mesh, layout=layout)` is to do."""
    face = "torch_backend.fully_shard"
    with (
        mock.patch.object(sys.modules[face], "PerParamLayout", lambda specs, size, *_: layout_of(layout, specs, size)),
        mock.patch.object(
            sys.modules[face],
            "DTensorExposure",
            lambda owned, store, leaves, *_: PieceExposure(owned, store, leaves, mesh, store.rank),
        ),
    ):
        fully_shard(module, mesh=mesh)
    module.register_state_dict_post_hook(show_dtensors)
    module.register_load_state_dict_pre_hook(take_dtensors)


def places_of(kind: str, specs: Any, full: list[Tensor], mesh: DeviceMesh) -> tuple[ShardStore, list[Place]]:
    """A shard of these parameters by itself, without a module."""
    shards = Communicator(mesh.get_group(mesh.ndim - 1))
    store = ShardStore(layout_of(kind, specs, shards.size), shards.rank, full)
    return store, [Place(store, i, mesh, shards) for i in range(len(full))]
