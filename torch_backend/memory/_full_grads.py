"""FullGrads: the unsharded gradients of a unit, one per leaf, until they are reduced."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn


class FullGrads:
    """Unsharded gradients of this backward, and of earlier backwards that did not reduce (R15)."""

    def __init__(self, leaves: Sequence[nn.Parameter]) -> None:
        """
        Args:
            leaves: the unsharded parameters.
        """
        self._leaves = leaves
        self._arrived: list[Tensor | None] = [None] * len(leaves)
        self._have_arrived = False
        # Usually None.
        self._earlier: list[Tensor | None] | None = None

    def add(self, indices: Sequence[int], grads: Iterable[Tensor | None]) -> None:
        """Accumulate the gradients of the leaves with these indices, from one use of the unit."""
        for i, grad in zip(indices, grads, strict=True):
            if grad is not None:
                self._have_arrived = True
                # Out of place because autograd may share the tensor with another node.
                before = self._arrived[i]
                self._arrived[i] = grad if before is None else before + grad

    def keep(self, dtypes: Callable[[], Sequence[torch.dtype]]) -> None:
        """Begin another backward: add the gradients of the last one to those of earlier ones, in these dtypes."""
        if self._have_arrived:
            earlier = self._earlier or [None] * len(self._arrived)
            self._earlier = [
                _sum(before, None if grad is None else grad.to(dtype))
                for before, grad, dtype in zip(earlier, self._arrived, dtypes(), strict=True)
            ]
            self._forget_arrived()

    @property
    def any(self) -> bool:
        if self._have_arrived or self._earlier is not None:
            return True
        return any(leaf.grad is not None for leaf in self._leaves)

    def take(self) -> list[Tensor | None]:
        """Return and clear the sum for each leaf; None without a gradient."""
        found = self._arrived
        if self._earlier is not None:
            # Gradients of this backward are in the compute dtype.
            dtype = next((grad.dtype for grad in self._earlier if grad is not None), None)
            sums = [_sum(a, b) for a, b in zip(self._earlier, found, strict=True)]
            found = [None if grad is None else grad.to(dtype) for grad in sums]
        for i, leaf in enumerate(self._leaves):
            # A leaf that the user got from `parameters()` while it was registered may have its own gradient.
            if leaf.grad is not None:
                found[i] = _sum(found[i], leaf.grad)
                leaf.grad = None
        self._forget_arrived()
        self._earlier = None
        return found

    def drop(self) -> None:
        self._forget_arrived()
        self._earlier = None
        for leaf in self._leaves:
            if leaf.grad is not None:
                leaf.grad = None

    def _forget_arrived(self) -> None:
        self._arrived = [None] * len(self._leaves)
        self._have_arrived = False

    def move_to(self, leaves: Sequence[nn.Parameter], dtypes: Sequence[torch.dtype]) -> "FullGrads":
        """The gradients for replacement leaves on another device or with other dtypes.

        Args:
            dtypes: the dtypes of gradients from earlier backwards.
        """
        moved = FullGrads(leaves)
        moved._arrived = [_moved(grad, leaf, leaf.dtype) for grad, leaf in zip(self._arrived, leaves, strict=True)]
        moved._have_arrived = self._have_arrived
        if self._earlier is not None:
            moved._earlier = [
                _moved(grad, leaf, dtype) for grad, leaf, dtype in zip(self._earlier, leaves, dtypes, strict=True)
            ]
        return moved


def _moved(grad: Tensor | None, leaf: nn.Parameter, dtype: torch.dtype) -> Tensor | None:
    return None if grad is None else grad.to(leaf.device, dtype)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b
