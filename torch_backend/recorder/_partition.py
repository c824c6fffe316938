"""Weights that ranks divide without DTensors: as Megatron-LM does or the user states, and as pieces of flat parameters.

Megatron-LM marks a divided parameter by `tensor_model_parallel`, `partition_dim` and `partition_stride`. With a stride of n, the
parameter consists of n runs along the dim, and a rank has its part of each of them.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from crossframe.errors import UsageError
from torch_backend.compat._dtypes import as_real
from torch_backend.pieces._piece_tensor import PieceTensor
from torch_backend.ranks._collectives import Communicator

_STATE = "megatron.core.parallel_state"


@dataclass(frozen=True)
class Partition:
    """How ranks divide one parameter.

    Attributes:
        ranks: those that have parts, in order.
        dim: the divided dim. stride: the number of runs along it; a rank has a part of each run.
    """

    ranks: Communicator
    dim: int
    stride: int = 1

    def full_shape(self, own: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole parameter, from that of a rank's part."""
        shape = list(own)
        shape[self.dim] *= self.ranks.size
        return tuple(shape)

    def full(self, own: Tensor) -> Tensor:
        """All elements. All ranks call it."""
        return joined(list(self.ranks.gather_all(whole_of(own).contiguous())), self.dim, self.stride)

    def own(self, full: Tensor) -> Tensor:
        """This rank's elements."""
        runs = full.chunk(self.stride, self.dim)
        return torch.cat([run.chunk(self.ranks.size, self.dim)[self.ranks.rank] for run in runs], self.dim)

    def set(self, param: Tensor, full: Tensor) -> None:
        """Set this rank's part, in place."""
        set_whole(param, self.own(full))


@dataclass(frozen=True)
class Divided:
    """Parameters that ranks divide without DTensors.

    Attributes:
        partitions: by name, where the ranks are known.
        unknown: names of the others.
    """

    partitions: Mapping[str, Partition] = field(default_factory=dict)
    unknown: Sequence[str] = ()


@dataclass(frozen=True)
class Pieces:
    """How ranks divide a parameter of a flat or ragged layout, or one inside a flat parameter: each has a range of elements.

    Attributes:
        ranks: the shard group; None: this rank alone.
        ranges: the elements of each rank, in the flattened parameter.
        part: the range in this rank's tensor; None: it has no other elements.
        shape: of the parameter; under tensor parallelism of this rank's part of it.
        spec: the DTensor of which it is the local part; None: it is whole.
        partition: how ranks divide it without a DTensor; None: it is whole.
    """

    ranks: Communicator | None
    ranges: Sequence[tuple[int, int]]
    part: tuple[int, int] | None
    shape: tuple[int, ...]
    spec: Any = None
    partition: Partition | None = None

    def full_shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        if self.partition is not None:
            return self.partition.full_shape(self.shape)
        return self.shape if self.spec is None else tuple(self.spec.shape)

    def full(self, own: Tensor) -> Tensor:
        """All elements. All ranks call it."""
        here, found = self._here(own), []
        if self.ranks is None:
            found.append(here)
        else:
            sent = here.new_zeros(max(stop - start for start, stop in self.ranges))
            sent[: here.numel()] = here
            every = zip(self.ranks.gather_all(sent), self.ranges, strict=True)
            found += [piece[: stop - start] for piece, (start, stop) in every]
        whole = torch.cat(found).reshape(self.shape)
        if self.partition is not None:
            return self.partition.full(whole)
        if self.spec is None:
            return whole
        mesh, placements = self.spec.mesh, self.spec.placements
        made = DTensor.from_local(
            whole, mesh, placements, run_check=False, shape=self.spec.shape, stride=self.spec.stride
        )
        return made.full_tensor()

    def set(self, param: Tensor, full: Tensor) -> None:
        """Set this rank's elements, in place."""
        if self.partition is not None:
            full = self.partition.own(full)
        if self.spec is not None:
            mesh = self.spec.mesh
            same = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
            full = same.redistribute(placements=self.spec.placements)._local_tensor
        start, stop = self.ranges[0 if self.ranks is None else self.ranks.rank]
        self._here(param).copy_(full.reshape(-1)[start:stop])

    def complete(self, own: Mapping[str, Any], like: Tensor) -> dict[str, Any]:
        """The values of a parameter that any rank has, by name. On a rank without them, tensors are empty."""
        if self.ranks is None:
            return dict(own)
        every = self.ranks.gather_objects({k: None if isinstance(v, Tensor) else v for k, v in own.items()})
        empty = local_of(like).new_zeros(0)
        others = {k: empty if v is None else v for of_rank in every for k, v in of_rank.items()}
        return {k: own.get(k, v) for k, v in others.items()}

    def _here(self, own: Tensor) -> Tensor:
        local = local_of(own).reshape(-1)
        return local if self.part is None else local[self.part[0] : self.part[1]]


def in_forward(partition: Partition | Pieces) -> Partition | None:
    """How ranks divide the parameter that forward reads; None: it is whole, or a DTensor."""
    return partition if isinstance(partition, Partition) else partition.partition


def whole_of(tensor: Tensor) -> Tensor:
    """All elements of a DTensor; any other tensor itself. All ranks call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def set_whole(param: Tensor, values: Tensor) -> None:
    """Set a parameter, of a DTensor this rank's part, in place."""
    if isinstance(param, DTensor):
        mesh = param.device_mesh
        same = DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim, run_check=False)
        param._local_tensor.copy_(same.redistribute(placements=param.placements)._local_tensor)
    else:
        param.copy_(values)


def parts_of_dtensors(params: Mapping[str, Tensor]) -> dict[str, Pieces]:
    """By name the parameters that torch's DistributedDataParallel has made local parts of DTensors."""
    specs = {name: getattr(param, "_st_info", None) for name, param in params.items()}
    return {
        name: Pieces(None, [(0, params[name].numel())], None, tuple(params[name].shape), spec)
        for name, spec in specs.items()
        if spec is not None
    }


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor. Sparse gradients, as of embeddings, become dense; complex numbers become pairs."""
    if isinstance(tensor, PieceTensor):
        return tensor.local
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return as_real(local.to_dense() if local.is_sparse else local)


def joined(parts: Sequence[Tensor], dim: int, runs: int = 1) -> Tensor:
    """Parts along a dim, each of which consists of runs, as one tensor with one run after the other."""
    return torch.cat([part.chunk(runs, dim)[run] for run in range(runs) for part in parts], dim)


def partitions_of(
    params: Mapping[str, Tensor],
    num_dims: Mapping[str, int],
    group: dist.ProcessGroup | None,
    stated: Mapping[str, int],
) -> "Divided":
    """The parameters that ranks divide, those with Megatron-LM's attributes and those that are stated.

    Args:
        num_dims: of each parameter.
        group: the ranks that divide them. None: Megatron-LM's own, if it is initialised.
        stated: the divided dim by name or pattern of names.

    Raises:
        UsageError: a pattern without a parameter, or a dim that a parameter has not.
    """
    found: dict[str, tuple[int, int]] = {}
    for name, param in params.items():
        if getattr(param, "tensor_model_parallel", False) and getattr(param, "partition_dim", -1) >= 0:
            found[name] = param.partition_dim, getattr(param, "partition_stride", 1)  # type: ignore[attr-defined]
    for pattern, dim in stated.items():
        names = [name for name in params if fnmatchcase(name, pattern)]
        if not names or not all(0 <= dim < num_dims[name] for name in names):
            raise UsageError(
                f"Recorder: partition: expected names or patterns of parameters and one of their dims, got {pattern!r}: {dim!r}"
            )
        found |= dict.fromkeys(names, (dim, 1))
    if not found or not dist.is_initialized() or dist.get_world_size() == 1:
        return Divided()
    if group is None and _STATE in sys.modules:
        group = sys.modules[_STATE].get_tensor_model_parallel_group()
    if group is None:
        return Divided(unknown=tuple(found))
    if group.size() == 1:
        return Divided()
    ranks = Communicator(group)
    return Divided({name: Partition(ranks, dim, stride) for name, (dim, stride) in found.items()})
