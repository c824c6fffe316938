"""A mesh axis over which a layer is divided, and collectives whose gradients are written out, as in Megatron-LM."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


class _Through(torch.autograd.Function):
    """Applies one function in forward and another one to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grads[0]), None, None


def local(param: Tensor) -> Tensor:
    """This rank's part of a parameter."""
    return param.to_local() if isinstance(param, DTensor) else param


@dataclass(frozen=True)
class Axis:
    """A mesh of one axis.

    Attributes:
        over_sequence: between divided layers, each rank has its part of the positions (sequence parallelism).
    """

    mesh: DeviceMesh
    over_sequence: bool = False

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()

    @property
    def size(self) -> int:
        return self.mesh.size()

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' tensors."""
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """All ranks' tensors, concatenated."""
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim)

    def own(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part."""
        return x.chunk(self.size, dim)[self.rank]

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of the sum."""
        return self.own(self.all_reduce(x), dim)

    def copied(self, x: Tensor) -> Tensor:
        """The same on all ranks, which each use it for a part: gradients are summed."""
        return _Through.apply(x, lambda x: x.view_as(x), self.all_reduce)  # type: ignore[return-value]

    def reduced(self, x: Tensor) -> Tensor:
        """The sum, which all ranks use alike: each has the whole gradient."""
        return _Through.apply(x, self.all_reduce, lambda grad: grad)  # type: ignore[return-value]

    def gathered(self, x: Tensor, dim: int) -> Tensor:
        """All parts, which each rank uses for a part of the result: gradients are summed and divided."""
        return _Through.apply(x, lambda x: self.all_gather(x, dim), lambda grad: self.reduce_scatter(grad, dim))  # type: ignore[return-value]

    def scattered(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of the sum: gradients are gathered."""
        return _Through.apply(x, lambda x: self.reduce_scatter(x, dim), lambda grad: self.all_gather(grad, dim))  # type: ignore[return-value]

    def joined(self, x: Tensor, dim: int, own: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """All parts, which all ranks use alike: the gradient is this rank's part (`own`)."""
        return _Through.apply(x, lambda x: self.all_gather(x, dim), own or (lambda grad: self.own(grad, dim)))  # type: ignore[return-value]
