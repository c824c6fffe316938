"""Tensor parallelism: units shard the local parts of DTensors, and modules compute with the DTensors."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from crossframe.errors import ReplacedError
from torch_backend.mesh._device_mesh import has_same_ranks, joined


@dataclass(frozen=True, eq=False)
class TensorParallelParam:
    """The DTensor whose local tensor on this rank is an unsharded parameter.

    Attributes:
        spec: its mesh, placements, shape and dtype.
        kept_partial: the mesh axes over which a gradient may stay partial because it is reduced over them later.
        data_mesh: the data-parallel mesh: (shard,) or (replicate, shard). None if unknown.
    """

    spec: DTensorSpec
    kept_partial: frozenset[int] = frozenset()
    data_mesh: DeviceMesh | None = None
    _specs: dict[torch.dtype, DTensorSpec] = field(default_factory=dict, repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.spec.shape)

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups of more than one rank whose local tensors differ."""
        mesh = self.spec.mesh
        return tuple(
            mesh.get_group(axis)
            for axis, placement in enumerate(self.spec.placements)
            if not placement.is_replicate() and mesh.size(axis) > 1
        )

    @functools.cached_property
    def sharded(self) -> "TensorParallelParam":
        """The DTensor on the combined mesh, with the local tensor sharded on dim 0 over the data-parallel ranks."""
        assert self.data_mesh is not None
        return TensorParallelParam(sharded_spec(self.spec, self.data_mesh, 0))

    def is_over(self, mesh: DeviceMesh) -> bool:
        """Whether this is the tensor-parallel mesh or the combined mesh."""
        return mesh == self.spec.mesh or (self.data_mesh is not None and mesh == self.sharded.spec.mesh)

    def part(self, value: DTensor) -> tuple[Tensor, bool]:
        """(local tensor of a DTensor on one of these meshes with any placements, whether it is that of `sharded`). All ranks of
        the mesh must call it."""
        over_both = value.device_mesh != self.spec.mesh
        is_sharded = over_both and value.placements == self.sharded.spec.placements
        wanted = self.spec.placements
        if over_both:
            wanted = (*[Replicate()] * (value.device_mesh.ndim - len(wanted)), *wanted)
        if not is_sharded and value.placements != wanted:
            value = value.redistribute(placements=wanted)
        return value.to_local(), is_sharded

    def used(self, local: Tensor) -> Tensor:
        """The DTensor of `local` that a module computes with. The gradient of `local` has the DTensor's placements."""
        return _AsDTensor.apply(local, self)  # type: ignore[return-value]

    def dtensor(self, local: Tensor, *, requires_grad: bool = False) -> DTensor:
        """The DTensor of `local` with its dtype, detached."""
        spec = self._specs.get(local.dtype)
        if spec is None:
            meta = self.spec.tensor_meta
            assert meta is not None
            spec = replace(self.spec, tensor_meta=TensorMeta(meta.shape, meta.stride, local.dtype))
            self._specs[local.dtype] = spec
        # Skips __init__, which does nothing but has an expensive wrapper.
        return DTensor.__new__(DTensor, local.detach(), spec, requires_grad=requires_grad)

    def param(self, local: Tensor, *, requires_grad: bool) -> nn.Parameter:
        """Convert to a parameter; nn.Parameter of a DTensor returns the same object."""
        made: Any = self.dtensor(local, requires_grad=requires_grad)
        made._is_param = True
        return made

    def registered(self, leaf: nn.Parameter) -> nn.Parameter:
        """The DTensor parameter with the local tensor `leaf` that a module registers while unsharded.

        Its gradient is moved to `leaf` when it is accumulated, because a user may compute with registered parameters outside of
        forward, and reductions use the gradients of leaves.
        """
        trainable = leaf.is_floating_point()
        with torch.no_grad():
            param = self.param(leaf.data, requires_grad=trainable)

        @torch.no_grad()
        def move_grad(param: Any) -> None:
            grad, param.grad = self.local_grad(param.grad), None
            leaf.grad = grad if leaf.grad is None else leaf.grad + grad

        if trainable:  # may be frozen now and trained later
            param.register_post_accumulate_grad_hook(move_grad)
        param.requires_grad_(leaf.requires_grad)
        return param

    def local_grad(self, grad: Any) -> Tensor:
        """The gradient of the local tensor, from the gradient of the DTensor."""
        wanted = tuple(
            came if axis in self.kept_partial else placement
            for axis, (came, placement) in enumerate(zip(grad.placements, self.spec.placements, strict=True))
        )
        if wanted != grad.placements:
            grad = grad.redistribute(placements=wanted)
        local = grad._local_tensor
        return local.wait() if hasattr(local, "wait") else local

    def local(self, value: Tensor, name: str) -> Tensor:
        """The local tensor of a summoned parameter that the user may have replaced.

        Raises:
            ReplacedError: a plain tensor, or a DTensor of other placements or on other ranks.
        """
        if not isinstance(value, DTensor):
            came = type(value).__name__
        elif value._spec.placements != self.spec.placements:
            came = f"DTensor of placements {value.placements}"
        elif not has_same_ranks(value._spec.mesh, self.spec.mesh):
            came = f"DTensor on the mesh of ranks {value._spec.mesh.mesh.tolist()}"
        else:
            return value._local_tensor
        raise ReplacedError(
            f"parameter {name!r} was replaced by a {came}; expected a DTensor of placements {self.spec.placements} on the mesh "
            f"of tensor parallelism, of ranks {self.spec.mesh.mesh.tolist()} (use distribute_tensor), or copy into the parameter"
        )


class _AsDTensor(torch.autograd.Function):
    """Converts a local tensor to the DTensor that the module computes with, and its gradient back."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, tp_param: TensorParallelParam) -> Tensor:
        ctx.tp_param = tp_param
        return tp_param.dtensor(local.view_as(local), requires_grad=local.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Tensor, None]:
        return ctx.tp_param.local_grad(grad), None


TensorParallelParams = Sequence[TensorParallelParam | None]
"""The DTensor of each parameter of a bucket, None for a plain one. Empty if all are plain."""


def sharded_spec(tp_param: DTensorSpec, data_mesh: DeviceMesh, dim: int, *, shards: bool = True) -> DTensorSpec:
    """The DTensor spec of a tensor-parallel parameter whose local tensors are sharded on a dim over the last axis of another
    mesh.

    Args:
        tp_param: spec of the unsharded parameter.
        data_mesh: the data-parallel mesh, whose other axes replicate.
        shards: whether its last axis shards; if not, all axes replicate.
    """
    split = tp_param.num_shards_map[dim]
    shard: tuple[Placement, ...] = ()
    if shards:  # tensor parallelism shards the dim first
        shard = (_StridedShard(dim, split_factor=split) if split > 1 else Shard(dim),)
    replicate = tuple(Replicate() for _ in range(data_mesh.ndim - len(shard)))
    return DTensorSpec(
        joined(data_mesh, tp_param.mesh), (*replicate, *shard, *tp_param.placements), tp_param.tensor_meta
    )


def tensor_parallel_params(params: Sequence[Tensor], data_mesh: DeviceMesh | None) -> TensorParallelParams:
    """The DTensors among the parameters of a bucket."""
    tp_params = [
        TensorParallelParam(param._spec, data_mesh=data_mesh) if isinstance(param, DTensor) else None
        for param in params
    ]
    return tp_params if any(tp_params) else []


def in_use(aliases: Sequence[Tensor], tp_params: TensorParallelParams) -> Sequence[Tensor]:
    """The tensors that modules compute with: aliases of unsharded parameters, or DTensors of them."""
    if not tp_params:
        return aliases
    return [
        alias if tp_param is None else tp_param.used(alias) for alias, tp_param in zip(aliases, tp_params, strict=True)
    ]


def as_params(
    values: Sequence[Tensor], requires_grad: Sequence[bool], tp_params: TensorParallelParams
) -> list[nn.Parameter]:
    """Parameters that alias full values; DTensors for tensor parallelism."""
    return [
        nn.Parameter(value, requires_grad=trained) if tp_param is None else tp_param.param(value, requires_grad=trained)
        for value, trained, tp_param in zip(values, requires_grad, tp_params or [None] * len(values), strict=True)
    ]
