"""Optimizers of libraries, which are none of `torch.optim`, as optimizers of torch that have the same parameters and state."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_FOLLOWER = "_crossframe_follower"


class Follower(Optimizer):
    """An optimizer of torch whose step is that of another one. Classes for a library say how to read its optimizers.

    Args:
        followed: the optimizer of the library.
    """

    loss_divisor = 1.0
    """The optimizer divides gradients by it, and the recorder the sum of the losses of a step's backward passes."""

    def __init__(self, followed: Any) -> None:
        self._followed = followed
        super().__init__(self._groups(), {})

    def follow(self, step: Callable[[], Any]) -> None:
        """Let the library's optimizer step under torch's hooks."""
        self.param_groups = self._groups()  # schedules and callbacks may have changed options
        self.step(step)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()
        for param, values in self._states():
            self.state[param] = {
                name: value if isinstance(value, Tensor) else torch.tensor(float(value))
                for name, value in values.items()
            }

    def _groups(self) -> list[dict[str, Any]]:
        """The parameter groups, with options under torch's names."""
        raise NotImplementedError

    def _states(self) -> Iterator[tuple[Tensor, Mapping[str, Any]]]:
        """Each parameter with its state, under torch's names where the values mean the same."""
        raise NotImplementedError


def known_follower_of(optimizer: Any) -> Any:
    """The follower of a library's optimizer, or None."""
    return vars(optimizer).get(_FOLLOWER)


def follower_of(optimizer: Any, name: str, kind: Callable[..., Follower], *arguments: Any) -> Any:
    """The follower of a library's optimizer, which is made once.

    Args:
        name: torch's name of the optimizer's class, or another one where torch has none.
        kind, arguments: the class of the follower, and what it is made with besides the optimizer.
    """
    if (found := known_follower_of(optimizer)) is None:
        found = type(name, (kind,), {})(optimizer, *arguments)  # type: ignore[call-overload]
        setattr(optimizer, _FOLLOWER, found)
    return found
