"""Keeps what forwards report until it is clear that they are part of a step of training.

[Note: forwards in doubt] Not every forward with gradients is one of training. An evaluation may have forgotten `no_grad`, an
attack looks for inputs that the model takes for something else, and a saliency map shows what an output depends on. The last two
need gradients of the inputs, with which backward computes those of parameters, and the script discards these. So what a forward
in the other mode reports waits until backward follows, and what one reports whose inputs require gradients waits until an
optimizer steps. If no parameter has a gradient other than zero when the next backward begins, the backward before it was none of
training.
"""

from collections.abc import Callable, Iterable, Sequence
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
    before: Sequence["Doubt"]
    has_backward: bool = False
    reports: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)


class Forwards:
    """The forwards of a step.

    Attributes:
        number: how many there are, with those in doubt.
        awaits_backward: whether the last one was one of training, as far as its mode tells, and no backward has begun since.
    """

    def __init__(self) -> None:
        self.number, self.awaits_backward = 0, False
        # The last ones, if they are in doubt; later ones wait for those before them. And the backwards since the first one.
        self._in_doubt: list[Doubt] = []
        self._num_backwards = 0
        # The last one whose graph was freed since the last backward.
        self._freed: Doubt | None = None

    @property
    def may_be_first(self) -> bool:
        """Whether all forwards before the last one are in doubt."""
        return self.number - len(self._in_doubt) <= (not self._in_doubt)

    def begin(self, *, is_other: bool = False, wants_input_grads: bool = False) -> None:
        """Another one begins."""
        if is_other or wants_input_grads or self._in_doubt:
            before = [each for each in self._in_doubt if each.has_backward]
            self._in_doubt.append(Doubt(is_other, wants_input_grads, self.awaits_backward, before))
        self.number, self.awaits_backward = self.number + 1, not is_other

    def report(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function with the number of the last forward and these arguments, once that is in doubt no more."""
        if self._in_doubt:  # the script may change tensors in place before that
            self._in_doubt[-1].reports.append((function, tuple(_cloned(each) for each in args)))
        else:
            function(self.number - 1, *args)

    def drop_evaluation(self) -> bool:
        """Forget the last forward if it was an evaluation; returns whether it was."""
        last = self._in_doubt[-1] if self._in_doubt else None
        if last is None or not last.is_other or last.has_backward:
            return False
        self._drop([last])
        return True

    def backward_begins(self, params: Iterable[Tensor]) -> int:
        """Backward begins: the last forward was one of training, whatever its mode, if its inputs require no gradients.

        Args:
            params: those of the model.

        Returns:
            How many backwards before this one were none of training.
        """
        num_discarded = self._num_backwards if self._num_backwards and are_cleared(params) else 0
        if num_discarded:
            self._drop([each for each in self._in_doubt if each.has_backward])
            self._num_backwards = 0
        if self._freed is not None and not self.awaits_backward:  # of a function that computes its gradients itself
            self._in_doubt.append(self._freed)
            self.number += 1
        self._freed, self.awaits_backward = None, False
        for each in self._in_doubt:
            each.has_backward = True
        if any(each.wants_input_grads for each in self._in_doubt):
            self._num_backwards += 1
        else:
            self.release()
        return num_discarded

    def backward_ended(self, params: Iterable[Tensor]) -> None:
        """Backward has ended. If no parameter has a gradient, whatever shards the model has it, and may have set it to None."""
        if self._num_backwards and all(param.grad is None for param in params):
            self.release()

    def input_grads_returned(self) -> None:
        """Gradients of inputs alone have been computed, and the graph of the last forwards has been freed."""
        if dropped := [each for each in self._in_doubt if not each.has_backward]:
            self.awaits_backward, self._freed = dropped[0].awaited, dropped[-1]
            self._drop(dropped)

    def release(self) -> None:
        """The forwards so far are of training, if backward has begun since. Those of an attack before them are not, even if the
        optimizer gets their gradients."""
        trained = (each for each in self._in_doubt if each.has_backward and not each.wants_input_grads)
        self._drop([attack for each in trained for attack in each.before if attack in self._in_doubt])
        waiting = [each for each in self._in_doubt if each.has_backward]
        first = self.number - len(self._in_doubt)
        self._in_doubt, self._num_backwards = self._in_doubt[len(waiting) :], 0
        for i, each in enumerate(waiting):
            for function, args in each.reports:
                function(first + i, *args)

    def _drop(self, dropped: Sequence[Doubt]) -> None:
        self.number -= len(set(dropped))
        self._in_doubt = [each for each in self._in_doubt if each not in dropped]


def are_cleared(params: Iterable[Tensor]) -> bool:
    """Whether no parameter has a gradient other than zero."""
    grads = (param.grad for param in params)
    return not any(grad is not None and bool(grad.detach().any()) for grad in grads)


def _cloned(value: Any) -> Any:
    if isinstance(value, list):
        return [_cloned(each) for each in value]
    return value.clone() if isinstance(value, Tensor) else value
