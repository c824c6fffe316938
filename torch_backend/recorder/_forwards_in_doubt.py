"""Keeps what forwards report until it is clear that they are part of a step of training.

[Note: forwards in doubt] Not every forward with gradients is one of training. An evaluation may have forgotten `no_grad`, a part
of the model may be called for the shape of its output, an attack looks for inputs that the model takes for something else, and a
saliency map shows what an output depends on. The last two need gradients of the inputs, with which backward computes those of
parameters, and the script discards these. So a forward in the other mode, and one of parts of a model that has a forward, waits
until backward begins, and one whose inputs require gradients until an optimizer steps. The latter is not part of training if the
gradients that its backward has left are None or zero when the next backward begins, after another forward; if its backward has
left none, though the parameters are whole; or if its graph was freed for gradients of inputs alone. Forwards of L-BFGS are not in
doubt: its closure clears gradients that it has used.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_NEAR = 0.5
"""An attack moves inputs by less than this share of their norm."""


@dataclass(eq=False)
class Doubt:
    """A forward in doubt.

    Attributes:
        is_other: the model is in the other mode: an evaluation, unless backward follows.
        is_of_parts: parts of a model that has a forward were called.
        wants_input_grads: its inputs require gradients.
        awaited_backward: whether another forward waited for backward when it began.
        earlier_forwards: those in doubt that had a backward when it began.
        has_backward: whether backward has begun since.
        batch: its inputs.
        reports: functions, which get the number of the forward in its step first, and their other arguments.
    """

    is_other: bool
    is_of_parts: bool
    wants_input_grads: bool
    awaited_backward: bool
    earlier_forwards: Sequence["Doubt"]
    has_backward: bool = False
    batch: Sequence[Tensor] = ()
    reports: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)

    def is_attacked_by(self, other: "Doubt") -> bool:
        """Whether the inputs of a later forward are these, moved a little."""
        pairs = [
            (x, y)
            for x, y in zip(self.batch, other.batch, strict=False)
            if x.shape == y.shape and x.is_floating_point()
        ]
        return bool(pairs) and all(bool(torch.dist(x, y) <= _NEAR * x.norm()) for x, y in pairs)


class Forwards:
    """The forwards of a step.

    Attributes:
        number: how many there are, with those in doubt.
        awaits_backward: whether the last one was one of training, as far as its mode tells, and no backward has begun since.
    """

    def __init__(self) -> None:
        self.number, self.awaits_backward = 0, False
        # The last ones, if they are in doubt; later ones wait for those before them.
        self._in_doubt: list[Doubt] = []
        # The backwards since the first one in doubt, and whether they have left gradients.
        self._num_backwards, self._had_grads = 0, False
        # The last one whose graph was freed since the last backward.
        self._freed_forward: Doubt | None = None

    @property
    def has_earlier(self) -> bool:
        """Whether a forward before the last one is part of training for certain."""
        return self.number > max(len(self._in_doubt), 1)

    @property
    def is_evaluation(self) -> bool:
        """Whether the last one is in the other mode, and no backward has begun since."""
        return bool(self._in_doubt) and self._in_doubt[-1].is_other and not self._in_doubt[-1].has_backward

    def begin(
        self,
        *,
        is_other: bool = False,
        is_of_parts: bool = False,
        wants_input_grads: bool = False,
        batch: Sequence[Tensor] = (),
    ) -> None:
        """Another one begins."""
        if is_other or is_of_parts or wants_input_grads or self._in_doubt:
            earlier = [each for each in self._in_doubt if each.has_backward]
            doubt = Doubt(is_other, is_of_parts, wants_input_grads, self.awaits_backward, earlier, batch=batch)
            self._in_doubt.append(doubt)
        self.number, self.awaits_backward = self.number + 1, not is_other

    def report(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function with the number of the last forward and these arguments, once that is in doubt no more."""
        if self._in_doubt:  # the script may change tensors in place before that
            self._in_doubt[-1].reports.append((function, tuple(_cloned(each) for each in args)))
        else:
            function(self.number - 1, *args)

    def drop_evaluation(self) -> bool:
        """Forget the last forward if it was an evaluation; returns whether it was."""
        if self.is_evaluation:
            self._drop(self._in_doubt[-1:])
            return True
        return False

    def drop_parts(self) -> None:
        """Forget the last forward if parts alone were called, now that the model is."""
        last = self._in_doubt[-1] if self._in_doubt else None
        if last is not None and last.is_of_parts and not last.has_backward:
            self.awaits_backward = last.awaited_backward
            self._drop([last])

    def backward_begins(self, params: Iterable[Tensor], *, keeps_graph: bool) -> int:
        """Backward begins: the last forward was one of training, whatever its mode, if its inputs require no gradients.

        Args:
            params: those of the model.
            keeps_graph: whether another backward may follow through the same forwards.

        Returns:
            How many backwards before this one were not part of training.
        """
        is_after_forward = any(not each.has_backward for each in self._in_doubt)
        num_discarded = self._num_backwards if is_after_forward and self._had_grads and are_cleared(params) else 0
        if num_discarded:
            self._discard()
        if (
            self._freed_forward is not None and not self.awaits_backward
        ):  # of a function that computes its gradients itself
            self._in_doubt.append(self._freed_forward)
            self.number += 1
        self._freed_forward, self.awaits_backward = None, False
        for each in self._in_doubt:
            each.has_backward = True
        if any(each.wants_input_grads for each in self._in_doubt) and not keeps_graph:
            self._num_backwards += 1
        else:
            self.release()
        return num_discarded

    def backward_ended(self, params: Sequence[Tensor], *, are_whole: bool) -> int:
        """Backward has ended. Returns how many backwards were not part of training.

        Args:
            are_whole: whether all parameters are. If not, whatever shards them may have their gradients.
        """
        if not self._num_backwards:
            return 0
        if any(param.grad is not None for param in params):
            self._had_grads = self._had_grads or not are_cleared(params)
            return 0
        if not are_whole:
            self.release()
            return 0
        num_discarded = self._num_backwards
        self._discard()
        return num_discarded

    def input_grads_returned(self) -> None:
        """Gradients of inputs alone have been computed, and the graph of the last forwards has been freed."""
        if dropped := [each for each in self._in_doubt if not each.has_backward]:
            self.awaits_backward, freed = dropped[0].awaited_backward, dropped.pop()
            self._drop(dropped)
            self._in_doubt.remove(freed)
            self.number, self._freed_forward = self.number - 1, freed

    def release(self) -> None:
        """The forwards so far are of training, if backward has begun since. Those of an attack before them are not, even if the
        optimizer gets their gradients."""
        trained = [each for each in self._in_doubt if each.has_backward and not each.wants_input_grads]
        attacks = [(early, each) for each in trained for early in each.earlier_forwards if early in self._in_doubt]
        self._drop([early for early, each in attacks if early.is_attacked_by(each)])
        waiting = [each for each in self._in_doubt if each.has_backward]
        first = self.number - len(self._in_doubt)
        self._in_doubt, self._num_backwards, self._had_grads = self._in_doubt[len(waiting) :], 0, False
        for i, each in enumerate(waiting):
            reports, each.reports, each.earlier_forwards = each.reports, [], ()
            for function, args in reports:
                function(first + i, *args)

    def _discard(self) -> None:
        self._drop([each for each in self._in_doubt if each.has_backward])
        self._num_backwards, self._had_grads = 0, False

    def _drop(self, dropped: Sequence[Doubt]) -> None:
        self.number -= len(set(dropped))
        self._in_doubt = [each for each in self._in_doubt if each not in dropped]
        for each in dropped:  # which later ones may know
            each.reports, each.earlier_forwards, each.batch = [], (), ()


def are_cleared(params: Iterable[Tensor]) -> bool:
    """Whether no parameter has a gradient other than zero on this rank."""
    grads = (getattr(param.grad, "_local_tensor", param.grad) for param in params)
    return not any(grad is not None and bool(grad.detach().any()) for grad in grads)


def _cloned(value: Any) -> Any:
    if isinstance(value, list):
        return [_cloned(each) for each in value]
    return value.clone() if isinstance(value, Tensor) else value
