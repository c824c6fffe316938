"""Models sharded by fully_shard under each of the layouts."""

# pyright: reportArgumentType=false

import functools
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from crossframe.layout import FlatLayout, RaggedLayout
from tests.on_torch.helpers.device import DEVICE
from torch_backend.fully_shard import fully_shard
from torch_backend.memory._store import ShardStore
from torch_backend.pieces._piece_location import PieceLocation
from torch_backend.ranks._collectives import Communicator

LAYOUTS = ("per_param", "flat", "ragged")


@functools.cache
def mesh_of(*sizes: int) -> DeviceMesh:
    """All ranks as a mesh: (shard,) or (replicate, shard). A rank makes each once: every other one has threads of its own, which
    nothing ends."""
    return init_device_mesh(DEVICE.type, sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])


def shard(model: nn.Module, layout: str, mesh: DeviceMesh | None = None) -> nn.Module:
    """Every module in `model.blocks`, and the model, as units of their own."""
    mesh = mesh_of(dist.get_world_size()) if mesh is None else mesh
    for module in (*getattr(model, "blocks", ()), model):
        fully_shard(module, mesh=mesh, layout=layout)
    return model


def locations_of(kind: str, specs: Any, full: list[Tensor], mesh: DeviceMesh) -> tuple[ShardStore, list[PieceLocation]]:
    """A shard of these parameters by itself, without a module, flat or ragged."""
    shards = Communicator(mesh.get_group(mesh.ndim - 1))
    specs = tuple(specs)
    layout = FlatLayout(specs, shards.size, keep_original=True) if kind == "flat" else RaggedLayout(specs, shards.size)
    store = ShardStore(layout, shards.rank, full)
    return store, [PieceLocation(store, i, mesh, shards) for i in range(len(full))]
