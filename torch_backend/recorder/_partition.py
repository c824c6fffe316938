"""Weights that ranks divide without DTensors, as Megatron-LM does, by attributes of parameters or as the user states.

Megatron-LM marks a divided parameter by `tensor_model_parallel`, `partition_dim` and `partition_stride`. With a stride of n, the
parameter consists of n runs along the dim, and a rank has its part of each of them.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import Tensor

from crossframe.errors import UsageError
from torch_backend.ranks._collectives import Communicator

_STATE = "megatron.core.parallel_state"


@dataclass(frozen=True)
class Partition:
    """How ranks divide one parameter.

    Attributes:
        ranks: that have parts, in order.
        dim: that is divided. stride: the number of runs, of which a rank has a part each.
    """

    ranks: Communicator
    dim: int
    stride: int = 1

    def full_shape(self, own: Tensor) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        shape = list(own.shape)
        shape[self.dim] *= self.ranks.size
        return tuple(shape)

    def full(self, own: Tensor) -> Tensor:
        """All elements. All ranks call it."""
        return joined(list(self.ranks.gather_all(own.contiguous())), self.dim, self.stride)

    def own(self, full: Tensor) -> Tensor:
        """This rank's elements."""
        runs = full.chunk(self.stride, self.dim)
        return torch.cat([run.chunk(self.ranks.size, self.dim)[self.ranks.rank] for run in runs], self.dim)


def joined(parts: Sequence[Tensor], dim: int, runs: int = 1) -> Tensor:
    """Parts along a dim, each of which consists of runs, as one tensor with one run after the other."""
    return torch.cat([part.chunk(runs, dim)[run] for run in range(runs) for part in parts], dim)


def partitions_of(
    params: Mapping[str, Tensor], group: dist.ProcessGroup | None, stated: Mapping[str, int]
) -> dict[str, Partition]:
    """By name the parameters that ranks divide, those with Megatron-LM's attributes and those that are stated.

    Args:
        group: the ranks that divide them. None: Megatron-LM's own, if it is initialised.
        stated: the divided dim by name or pattern of names.

    Raises:
        UsageError: divided parameters without a group, a pattern without a parameter, or a dim that a parameter has not.
    """
    found: dict[str, tuple[int, int]] = {}
    for name, param in params.items():
        if getattr(param, "tensor_model_parallel", False) and getattr(param, "partition_dim", -1) >= 0:
            found[name] = param.partition_dim, getattr(param, "partition_stride", 1)  # type: ignore[attr-defined]
    for pattern, dim in stated.items():
        names = [name for name in params if fnmatchcase(name, pattern)]
        if not names or not all(0 <= dim < params[name].ndim for name in names):
            raise UsageError(
                f"Recorder: partition: expected names or patterns of parameters and one of their dims, got {pattern!r}: {dim!r}"
            )
        found |= dict.fromkeys(names, (dim, 1))
    if not found:
        return {}
    if group is None and _STATE in sys.modules:
        group = sys.modules[_STATE].get_tensor_model_parallel_group()
    if group is None:
        raise UsageError(
            f"Recorder: parameter {next(iter(found))!r} is divided over ranks without a DTensor; pass tensor_parallel=, the "
            "process group of these ranks"
        )
    if group.size() == 1:
        return {}
    ranks = Communicator(group)
    return {name: Partition(ranks, dim, stride) for name, (dim, stride) in found.items()}
