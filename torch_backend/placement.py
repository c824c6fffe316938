"""Where a parameter lies on a mesh: dims, and DTensor placements, under tensor parallelism too (R07)."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from crossframe.errors import AssertedError, UnsupportedError, UsageError
from torch_backend.data_mesh import DataMesh, joined
from torch_backend.slots import local_of

PlacementFn = Callable[[nn.Parameter], Any]
"""The argument `shard_placement_fn`: from a parameter to a Shard, or None for dim 0."""


@dataclass(frozen=True, eq=False)
class Placed:
    """Where a parameter lies.

    Attributes:
        dim: on which dim it is sharded.
        sharded: of the sharded parameter, and of its gradient.
        whole: of the unsharded parameter, if that is a DTensor (tensor parallelism); None: it is a plain tensor.
        kept_partial: of the axes of `whole`, those over which a gradient may stay a partial sum, since it is reduced over
            them.
    """

    dim: int
    sharded: DTensorSpec
    whole: DTensorSpec | None = None
    kept_partial: frozenset[int] = frozenset()

    def in_dtype(self, dtype: torch.dtype) -> "Placed":
        """The same of an unsharded parameter in another dtype."""
        if self.whole is None:
            return self
        meta = self.whole.tensor_meta
        assert meta is not None
        return replace(self, whole=replace(self.whole, tensor_meta=TensorMeta(meta.shape, meta.stride, dtype)))


def place(name: str, param: nn.Parameter, data: DataMesh, fn: PlacementFn | None) -> Placed:
    """Where a parameter will lie.

    Args:
        fn: the argument `shard_placement_fn`.

    Raises:
        AssertedError: a dim that it has not.
        UnsupportedError: a dim above 0 that is no multiple of the shard axis, or a DTensor on a mesh of three axes.
        UsageError: `fn` returned something else than a Shard; a parameter that does not fit `dp_mesh_dims`.
    """
    dim = _dim(name, param, fn)
    known = data.placed.get((dim, param.shape, param.dtype)) if type(param) is nn.Parameter else None
    if known is not None:
        return known
    size = data.mesh.size(data.mesh.ndim - 1) if data.shards else 1
    if dim and local_of(param).shape[dim] % size:
        raise UnsupportedError(
            f"parameter {name!r} of shape {tuple(param.shape)}: dim {dim} is no multiple of the {size} ranks of the shard axis; "
            "shard it on dim 0, which may be uneven, or pad its size"
        )
    shard: tuple[Placement, ...] = (Shard(dim),) if data.shards else ()
    replicate = tuple(Replicate() for _ in range(data.mesh.ndim - len(shard)))
    if not isinstance(param, DTensor):
        if data.spmd is not None:
            raise UsageError(
                f"parameter {name!r} is a plain tensor; with dp_mesh_dims every parameter is a DTensor on the whole mesh, "
                "replicated over its data parallel axes (distribute_module makes them so)"
            )
        # Shards are contiguous whatever the parameter was.
        meta = TensorMeta(param.shape, torch.empty(param.shape, device="meta").stride(), param.dtype)
        placed = Placed(dim, DTensorSpec(data.mesh, (*replicate, *shard), meta))
        return data.placed.setdefault((dim, param.shape, param.dtype), placed)
    whole = param._spec
    if data.spmd is not None:
        return _place_spmd(name, whole, data, dim)
    if whole.mesh.ndim > 2:
        raise UnsupportedError(
            f"parameter {name!r} is a DTensor on a mesh of {whole.mesh.ndim} axes; expected one or two beside the data "
            "parallel ones"
        )
    split = whole.num_shards_map[dim]
    shard = (_StridedShard(dim, split_factor=split),) if data.shards and split > 1 else shard
    placements = (*replicate, *shard, *whole.placements)
    return Placed(dim, DTensorSpec(joined(data.mesh, whole.mesh), placements, whole.tensor_meta), whole)


def _place_spmd(name: str, whole: DTensorSpec, data: DataMesh, dim: int) -> Placed:
    mesh, (over_shards, over_replicas) = whole.mesh, data.dims
    if mesh != data.spmd:
        raise UsageError(f"parameter {name!r} is a DTensor on another mesh than the one given to fully_shard")
    for axis in (*over_shards, *over_replicas):
        if not isinstance(whole.placements[axis], Replicate):
            raise UsageError(
                f"parameter {name!r}: expected it replicated over the data parallel axis {mesh.mesh_dim_names[axis]!r}, got "  # type: ignore[index]
                f"{whole.placements[axis]}"
            )
    placements = list(whole.placements)
    for axis in over_shards:
        # What lies inside this axis on the same dim cuts the rows first.
        inner = [a for a in range(axis + 1, mesh.ndim) if a not in over_shards and whole.placements[a].is_shard(dim)]
        split = functools.reduce(lambda product, a: product * mesh.size(a), inner, 1)
        placements[axis] = _StridedShard(dim, split_factor=split) if split > 1 else Shard(dim)
    kept = frozenset((*over_shards, *over_replicas))
    if len(over_shards) <= 1:
        return Placed(dim, DTensorSpec(mesh, tuple(placements), whole.tensor_meta), whole, kept)
    # Several axes to shard over count as one: in their place stands the mesh that they make together.
    first, parts, found = min(over_shards), [], []
    for axis in range(mesh.ndim):
        if axis == first:
            parts.append(data.mesh)
            found += [Replicate()] * (data.mesh.ndim - 1) + [placements[axis]]
        elif axis not in kept:
            parts.append(mesh[mesh.mesh_dim_names[axis]])  # type: ignore[index]
            found.append(placements[axis])
    return Placed(dim, DTensorSpec(joined(*parts), tuple(found), whole.tensor_meta), whole, kept)


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


class _AsDTensor(torch.autograd.Function):
    """From what this rank has of a parameter to the DTensor that the module computes with, and back for its gradient."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, placed: Placed) -> Tensor:
        ctx.placed = placed
        return DTensor(local.view_as(local), placed.whole, requires_grad=local.requires_grad)  # type: ignore[call-arg]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Tensor, None]:
        return local_grad(grad, ctx.placed), None


def local_grad(grad: Any, placed: Placed) -> Tensor:
    """The gradient of what this rank has of a parameter, from the gradient of the DTensor that the module computes with."""
    assert placed.whole is not None
    wanted = tuple(
        came if axis in placed.kept_partial else placement
        for axis, (came, placement) in enumerate(zip(grad.placements, placed.whole.placements, strict=True))
    )
    if wanted != grad.placements:
        grad = grad.redistribute(placements=wanted)
    local = grad._local_tensor
    return local.wait() if hasattr(local, "wait") else local


def as_whole(local: Tensor, placed: Placed) -> Tensor:
    """What a module computes with: `local`, or the DTensor that it is the local part of."""
    return local if placed.whole is None else _AsDTensor.apply(local, placed)  # type: ignore[return-value]


def as_whole_param(leaf: nn.Parameter, placed: Placed) -> nn.Parameter:
    """What the module registers while it is unsharded: `leaf`, or a DTensor parameter of which it is the local part.

    The gradient of the DTensor is moved to `leaf` as soon as it has accumulated: a user may compute with what is registered
    outside of a forward, and reductions take the gradients of leaves.
    """
    if placed.whole is None:
        return leaf
    trainable = leaf.is_floating_point()
    with torch.no_grad():
        whole: Any = DTensor(leaf.data, placed.whole, requires_grad=trainable)  # type: ignore[call-arg]
    whole._is_param = True  # what nn.Parameter makes of a DTensor is that DTensor, marked

    @torch.no_grad()
    def move_grad(whole: Any) -> None:
        grad, whole.grad = local_grad(whole.grad, placed), None
        leaf.grad = grad if leaf.grad is None else leaf.grad + grad

    if trainable:  # it may be frozen now and trained later
        whole.register_post_accumulate_grad_hook(move_grad)
    return whole.requires_grad_(leaf.requires_grad)
