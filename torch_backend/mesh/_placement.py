"""The dims and DTensor placements of each parameter on a device mesh, including tensor parallelism (R07)."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from crossframe.errors import AssertedError, UnsupportedError, UsageError
from torch_backend.mesh._device_mesh import DataMesh, joined
from torch_backend.mesh._tensor_parallel import TensorParallelParam, sharded_spec
from torch_backend.modules._owned_params import local_of

PlacementFn = Callable[[nn.Parameter], Any]
"""The argument `shard_placement_fn`: from a parameter to a Shard, or None for dim 0."""


@dataclass(frozen=True, eq=False)
class Placed:
    """The placement of a parameter.

    Attributes:
        dim: the sharded dim.
        sharded: DTensor spec of the sharded parameter and its gradient.
        tp_param: DTensor of the unsharded parameter (tensor parallelism); None for a plain tensor.
    """

    dim: int
    sharded: DTensorSpec
    tp_param: TensorParallelParam | None = None


def place(name: str, param: nn.Parameter, data: DataMesh, fn: PlacementFn | None) -> Placed:
    """The placement of a parameter.

    Args:
        fn: the argument `shard_placement_fn`.

    Raises:
        AssertedError: an invalid dim.
        UnsupportedError: a dim above 0 that the shard axis does not divide, or a DTensor on a mesh with three axes.
        UsageError: `fn` did not return a Shard, or a parameter does not fit `dp_mesh_dims`.
    """
    dim = _dim(name, param, fn)
    known = data.placed.get((dim, param.shape, param.dtype)) if type(param) is nn.Parameter else None
    if known is not None:
        return known
    size = data.mesh.size(data.mesh.ndim - 1) if data.shards else 1
    if dim and local_of(param).shape[dim] % size:
        raise UnsupportedError(
            f"parameter {name!r} of shape {tuple(param.shape)}: dim {dim} is not a multiple of the {size} ranks of the "
            "shard axis; shard it on dim 0, which may be uneven, or pad its size"
        )
    shard: tuple[Placement, ...] = (Shard(dim),) if data.shards else ()
    replicate = tuple(Replicate() for _ in range(data.mesh.ndim - len(shard)))
    if not isinstance(param, DTensor):
        if data.spmd is not None:
            raise UsageError(
                f"parameter {name!r} is a plain tensor; with dp_mesh_dims every parameter is a DTensor on the whole mesh, "
                "replicated over its data parallel axes (distribute_module makes them so)"
            )
        # Shards are always contiguous.
        meta = TensorMeta(param.shape, torch.empty(param.shape, device="meta").stride(), param.dtype)
        placed = Placed(dim, DTensorSpec(data.mesh, (*replicate, *shard), meta))
        return data.placed.setdefault((dim, param.shape, param.dtype), placed)
    tp_param = param._spec
    if data.spmd is not None:
        return _place_spmd(name, tp_param, data, dim)
    if tp_param.mesh.ndim > 2:
        raise UnsupportedError(
            f"parameter {name!r} is a DTensor on a mesh of {tp_param.mesh.ndim} axes; expected one or two besides the data "
            "parallel axes"
        )
    return Placed(dim, sharded_spec(tp_param, data.mesh, dim, shards=data.shards), TensorParallelParam(tp_param))


def _place_spmd(name: str, tp_param: DTensorSpec, data: DataMesh, dim: int) -> Placed:
    mesh, (over_shards, over_replicas) = tp_param.mesh, data.dims
    if mesh != data.spmd:
        raise UsageError(f"parameter {name!r} is a DTensor on another mesh than the one given to fully_shard")
    for axis in (*over_shards, *over_replicas):
        if not isinstance(tp_param.placements[axis], Replicate):
            raise UsageError(
                f"parameter {name!r}: expected it replicated over the data parallel axis {mesh.mesh_dim_names[axis]!r}, got "  # type: ignore[index]
                f"{tp_param.placements[axis]}"
            )
    placements = list(tp_param.placements)
    for axis in over_shards:
        # An inner mesh axis on the same dim shards the rows first.
        inner = [a for a in range(axis + 1, mesh.ndim) if a not in over_shards and tp_param.placements[a].is_shard(dim)]
        split = functools.reduce(lambda product, a: product * mesh.size(a), inner, 1)
        placements[axis] = _StridedShard(dim, split_factor=split) if split > 1 else Shard(dim)
    kept = frozenset((*over_shards, *over_replicas))
    if len(over_shards) <= 1:
        return Placed(
            dim, DTensorSpec(mesh, tuple(placements), tp_param.tensor_meta), TensorParallelParam(tp_param, kept)
        )
    # Several shard axes are replaced by one flattened axis.
    first, parts, found = min(over_shards), [], []
    for axis in range(mesh.ndim):
        if axis == first:
            parts.append(data.mesh)
            found += [Replicate()] * (data.mesh.ndim - 1) + [placements[axis]]
        elif axis not in kept:
            parts.append(mesh[mesh.mesh_dim_names[axis]])  # type: ignore[index]
            found.append(placements[axis])
    return Placed(
        dim, DTensorSpec(joined(*parts), tuple(found), tp_param.tensor_meta), TensorParallelParam(tp_param, kept)
    )


def _dim(name: str, param: nn.Parameter, fn: PlacementFn | None) -> int:
    asked = None if fn is None else fn(param)
    if asked is None:
        return 0
    if not isinstance(asked, Shard):
        raise UsageError(f"shard_placement_fn: expected a Shard or None for parameter {name!r}, got {asked!r}")
    dim = asked.dim + param.ndim if asked.dim < 0 else asked.dim
    if not 0 <= dim < param.ndim:
        raise AssertedError(
            f"shard_placement_fn: parameter {name!r} of shape {tuple(param.shape)} has no dim {asked.dim} to shard"
        )
    return dim
