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
    """The dtypes of a unit's computation and reduction. Sharded parameters keep full precision (R33-R35).

    Attributes:
        param_dtype: dtype of unsharded parameters, and so of forward and backward. None: as stored.
        reduce_dtype: dtype of gradient reduction, and of accumulated unreduced gradients (R15). None: `param_dtype`.
        output_dtype: dtype to which floating-point outputs of each module are cast. None: not cast.
        cast_forward_inputs: cast the floating-point inputs of each module to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    @property
    def policy(self) -> PrecisionPolicy:
        """The equivalent PrecisionPolicy.

        Raises:
            ParamError: a dtype that is not trainable.
            PlanError: a choice that is not a bool.
        """
        return PrecisionPolicy(
            name_or_none(self.param_dtype),
            name_or_none(self.reduce_dtype),
            output_dtype=name_or_none(self.output_dtype),
            cast_forward_inputs=self.cast_forward_inputs,
        )


@dataclass
class OffloadPolicy:
    """No offloading: shards stay on the compute device."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Offloads shards, their gradients and optimizer states to the CPU. Shards are copied to the device for the all-gather.

    Attributes:
        pin_memory: whether to use pinned memory, from which copies to an accelerator do not block the host.
    """

    pin_memory: bool = True


class Comm(ABC):
    """A user's collective: allocates its buffers and communicates."""

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a send or receive buffer of shape `size`."""


class AllGather(Comm):
    """A user's all-gather, for `FSDPModule.set_custom_all_gather`."""

    @abstractmethod
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """All-gather `input_tensor` (n elements) into `output_tensor` (size * n elements), in rank order. With `async_op` it may
        return a work without waiting."""


class ReduceScatter(Comm):
    """A user's reduce-scatter, for `FSDPModule.set_custom_reduce_scatter`."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce-scatter `input_tensor` (size * n elements) into `output_tensor` (n elements). `op` is always a sum; division is
        separate (R26)."""


@dataclass
class DataParallelMeshDims:
    """The data-parallel axes of a mesh on which parameters are already DTensors.

    Attributes:
        shard: the axis or axes to shard over; several are flattened.
        replicate: the axis or axes to replicate over; several are flattened.

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
