"""Options of `fully_shard` under torch's names: precision, offload, mesh dims, custom collectives."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from crossframe.errors import UsageError
from crossframe.precision import PrecisionPolicy
from torch_backend.compat._dtypes import name_or_none

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "Comm",
    "DataParallelMeshDims",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReduceScatter",
]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """In which dtypes a unit computes and reduces, while its shards keep full precision (R33-R35).

    Attributes:
        param_dtype: of gathered parameters, and so of forward and backward. None: as stored.
        reduce_dtype: in which gradients are summed between ranks, and accumulate where they are not reduced (R15). None: that
            of `param_dtype`.
        output_dtype: of the floating outputs of each module. None: as they come.
        cast_forward_inputs: cast the floating inputs of each module to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    @property
    def policy(self) -> PrecisionPolicy:
        """The core's form of it.

        Raises:
            ParamError: a dtype in which nothing can be trained.
            PlanError: a choice that is no bool.
        """
        return PrecisionPolicy(
            name_or_none(self.param_dtype),
            name_or_none(self.reduce_dtype),
            output_dtype=name_or_none(self.output_dtype),
            cast_forward_inputs=self.cast_forward_inputs,
        )


@dataclass
class OffloadPolicy:
    """Where shards live between steps: on the device of compute. `CPUOffloadPolicy` says otherwise."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, their gradients and what the optimizer keeps live on the CPU; a unit's shard is copied to the device when it is
    gathered.

    Attributes:
        pin_memory: keep shards in memory from which they are copied to an accelerator without the host waiting. False where
            there is too little of it.
    """

    pin_memory: bool = True


class Comm(ABC):
    """A collective of the user's own: where its buffers come from, and what it does."""

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer to send from or to receive in, of shape `size`."""


class AllGather(Comm):
    """An all-gather of the user's own, for `FSDPModule.set_custom_all_gather`."""

    @abstractmethod
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Fill `output_tensor` (size * n elements) with the `input_tensor`s (n elements) of all ranks, in rank order. With
        `async_op` it may return at once with a work to wait for."""


class ReduceScatter(Comm):
    """A reduce-scatter of the user's own, for `FSDPModule.set_custom_reduce_scatter`."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Sum the `input_tensor`s (size * n elements) of all ranks, and leave this rank's n elements in `output_tensor`. `op` is
        always a sum: what is to be divided is divided around it (R26)."""


@dataclass
class DataParallelMeshDims:
    """Which axes of a mesh are data parallel, where parameters are DTensors on all of its axes already.

    Attributes:
        shard: the axis, or axes, to shard over; several count as one.
        replicate: the axis, or axes, over which shards are replicated; several count as one.

    Raises:
        UsageError: neither is given.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise UsageError(
                "DataParallelMeshDims: expected the name of an axis to shard or to replicate over, got none"
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The axes to shard over."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The axes to replicate over."""
        return _names(self.replicate)


def _names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
