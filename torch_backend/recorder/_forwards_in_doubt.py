"""Keeps what forwards report until it is clear that they are part of a step of training.

[Note: forwards in doubt] Not every forward with gradients is one of training. An evaluation may have forgotten `no_grad`, an
attack looks for inputs that the model takes for something else, and a saliency map shows what an output depends on. The last two
need gradients of the inputs, with which backward computes those of parameters, and the script discards these. So what a forward
in the other mode reports waits until backward follows, and what one reports whose inputs require gradients waits until an
optimizer steps. If no parameter has a gradient other than zero when the next backward begins, the backward before it was none of
training.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(eq=False)
class Doubt:
    """A forward in doubt.

    Attributes:
        is_other: the model is in the other mode: an evaluation, unless backward follows.
        wants_input_grads: its inputs require gradients.
        awaited: whether another forward waited for backward when it began.
        before: forwards in doubt that had a backward when it began.
        has_backward: whether backward has begun since.
        reports: functions, which get the number of the forward in its step first, and their other arguments.
    """

    is_other: bool
    wants_input_grads: bool
    awaited: bool
    before: list["Doubt"]
    has_backward: bool = False
    reports: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)

    def report(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function later. The script may change tensors in place before that."""
        self.reports.append((function, tuple(_cloned(each) for each in args)))


def are_cleared(params: Iterable[Tensor]) -> bool:
    """Whether no parameter has a gradient other than zero."""
    grads = (param.grad for param in params)
    return not any(grad is not None and bool(grad.detach().any()) for grad in grads)


def _cloned(value: Any) -> Any:
    if isinstance(value, list):
        return [_cloned(each) for each in value]
    return value.clone() if isinstance(value, Tensor) else value
