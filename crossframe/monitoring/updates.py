"""Finds parameters that moved as their optimizer cannot have moved them, from any two recorded steps, in sketches too.

`crossframe.inspection.optimizer` checks the rule element by element where two steps in a row were recorded in full. Between other
recorded steps, two bounds hold:

- *At most*: an element of a parameter under Adam or AdamW moves in a step by at most rate * c plus the decay, with

      c = (1 - beta1) / sqrt(1 - beta2) / sqrt(1 - beta1^2 / beta2)

  by the inequality of Cauchy and Schwarz for m = (1 - beta1) sum beta1^i g_i and v = (1 - beta2) sum beta2^i g_i^2; the bias
  corrections make it smaller. A sketch estimates the square of a distance with a standard deviation of sqrt(2 / 256), of which
  `SIGMAS` are allowed.
- *At least*: a parameter with a gradient, for which the optimizer counts steps at a rate that is not zero, does not keep its
  bits. If its steps are smaller than rounding of its dtype, that is a note: such updates are lost.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from crossframe.dtypes import unit_roundoff
from crossframe.recording import Recording
from crossframe.recording.event_format import PARAMETERS, REDUCE, UPDATE
from crossframe.recording.sketch import NUM_SUMS, Sketch
from crossframe.verdict.diagnosis.optimizer_rules import AdamW
from crossframe.verdict.diagnosis.stated_optimizer import ADAM, ADAMW, stated_rule
from crossframe.verdict.measure.values import assemble

SIGMAS = 6
_RESERVE = math.sqrt(1 + SIGMAS * math.sqrt(2 / NUM_SUMS))


@dataclass(frozen=True)
class UnexpectedMove:
    """A parameter that moved too far or not at all.

    Attributes:
        text: a clause.
        lost: whether rounding explains that it did not move.
    """

    parameter: str
    text: str
    lost: bool = False


class UpdateRule:
    """Compares the parameters of recorded steps with those of the recorded step before."""

    def __init__(self) -> None:
        self._before: dict[str, Sketch] = {}
        self._step = -1

    def add(self, recording: Recording, step: int) -> Iterator[UnexpectedMove]:
        """Add a recorded step.

        Raises:
            RecordingError: a tensor is damaged.
        """
        if step == 0:
            self._before = {name: self._sketch(recording, PARAMETERS, 0, name) for name in self._names(recording, step)}
        rates = [max(recording.learning_rates(each), default=math.nan) for each in range(self._step + 1, step + 1)]
        own = {name: self._sketch(recording, UPDATE, step, name) for name in self._names(recording, step)}
        if all(map(math.isfinite, rates)):
            for name, after in own.items():
                if name in self._before and not after.num_not_finite:
                    yield from _judge(recording, step, name, self._before[name], after, rates)
        self._before, self._step = own, step

    @staticmethod
    def _names(recording: Recording, step: int) -> list[str]:
        return [name for name in recording.manifest.params if recording.has(UPDATE, step, name)]

    @staticmethod
    def _sketch(recording: Recording, phase: str, step: int, name: str) -> Sketch:
        return assemble(recording, phase, step, name).sketched()


def _judge(
    recording: Recording, step: int, name: str, before: Sketch, after: Sketch, rates: list[float]
) -> Iterator[UnexpectedMove]:
    kind, count = recording.manifest.settings.get("optimizer"), recording.count(step, name)
    # At no count of steps is an update larger than without bias corrections.
    stated = stated_rule(recording.manifest, kind, math.inf, name) if kind in (ADAM, ADAMW) else None
    rule = stated.rule if stated is not None else None
    assert isinstance(rule, AdamW | None)
    root, num = math.sqrt(after.numel), len(rates)
    if rule is not None and rule.beta1**2 < rule.beta2 < 1:
        farthest = (1 - rule.beta1) / math.sqrt((1 - rule.beta2) * (1 - rule.beta1**2 / rule.beta2))
        decay = rule.decay * (max(before.norm, after.norm) + sum(rates) * farthest * root)
        most = sum(rates) * (farthest * root + decay)
        most += num * unit_roundoff(after.dtype) * max(before.norm, after.norm)
        moved = before.distance(after)
        if moved > _RESERVE * most:
            yield UnexpectedMove(
                name,
                f"moved by {moved:.3g} (norm) in {num} step{'s' * (num > 1)}, and {kind} moves it by at most {most:.3g} at these "
                "rates: something else wrote to it",
            )
    if not after.equals(before) or not count or not any(rates):
        return
    gradient = assemble(recording, REDUCE, step, name)
    if not gradient.norm or gradient.num_not_finite:
        return
    size = 1.0 if rule is not None else gradient.norm / root  # of a step, in units of the rate
    lost = max(rates) * size < unit_roundoff(after.dtype) * after.norm / root
    text = f"did not change in {num} step{'s' * (num > 1)}, although it has a gradient and the optimizer counts steps for it"
    yield UnexpectedMove(
        name, f"{text}: its updates are smaller than rounding in {after.dtype}" if lost else text, lost
    )
