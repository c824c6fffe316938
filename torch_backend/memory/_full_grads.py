"""FullGrads: the unsharded gradients of a unit, one per leaf, until they are reduced."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn


class FullGrads:
    """What autograd has delivered in this backward, and what earlier ones left that reduced nothing (R15)."""

    def __init__(self, leaves: Sequence[nn.Parameter]) -> None:
        """
        Args:
            leaves: the unsharded parameters.
        """
        self._leaves = leaves
        self._arrived: list[Tensor | None] = [None] * len(leaves)
        self._have_arrived = False
        # None as long as there are none, as a rule.
        self._earlier: list[Tensor | None] | None = None

    def add(self, indices: Sequence[int], grads: Iterable[Tensor | None]) -> None:
        """Take the gradients of one use of the unit, of the leaves of these indices."""
        for i, grad in zip(indices, grads, strict=True):
            if grad is not None:
                self._have_arrived = True
                # Out of place: the tensor that came may be another node's gradient as well.
                before = self._arrived[i]
                self._arrived[i] = grad if before is None else before + grad

    def keep(self, dtypes: Callable[[], Sequence[torch.dtype]]) -> None:
        """Another backward begins: add up what the last one delivered and what earlier ones left, in these dtypes."""
        if self._have_arrived:
            earlier = self._earlier or [None] * len(self._arrived)
            self._earlier = [
                _sum(before, None if grad is None else grad.to(dtype))
                for before, grad, dtype in zip(earlier, self._arrived, dtypes(), strict=True)
            ]
            self._forget_arrived()

    @property
    def any(self) -> bool:
        """Whether there are some."""
        if self._have_arrived or self._earlier is not None:
            return True
        return any(leaf.grad is not None for leaf in self._leaves)

    def take(self) -> list[Tensor | None]:
        """The sum for each leaf, None where there is nothing. They are forgotten here."""
        found = self._arrived
        if self._earlier is not None:
            # What came in this backward alone is in the dtype of compute, and they are collected in one dtype.
            dtype = next((grad.dtype for grad in self._earlier if grad is not None), None)
            sums = [_sum(a, b) for a, b in zip(self._earlier, found, strict=True)]
            found = [None if grad is None else grad.to(dtype) for grad in sums]
        for i, leaf in enumerate(self._leaves):
            # Where the user took it from `parameters()` while it was registered it has a gradient of its own.
            if leaf.grad is not None:
                found[i] = _sum(found[i], leaf.grad)
        self.drop()
        return found

    def drop(self) -> None:
        """Forget them."""
        self._forget_arrived()
        self._earlier = None
        for leaf in self._leaves:
            if leaf.grad is not None:
                leaf.grad = None

    def _forget_arrived(self) -> None:
        self._arrived = [None] * len(self._leaves)
        self._have_arrived = False

    def move_to(self, leaves: Sequence[nn.Parameter], dtypes: Sequence[torch.dtype]) -> "FullGrads":
        """The same for other leaves, which took the place of these: elsewhere, or of other dtypes.

        Args:
            dtypes: in which what earlier backwards left is kept.
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
