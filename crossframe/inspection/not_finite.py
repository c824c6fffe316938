"""Finds the first NaN or infinity in a run, and tells steps that a loss scaler skipped from others.

An infinity without effect is not a fault: attention masks contain -inf. The first value that is not finite is therefore a finding
only if a loss, a gradient, optimizer state or a parameter of the same step is not finite either. A step whose gradients are not
finite and whose parameters do not change was skipped, as by gradient scalers, and is reported as such.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from crossframe.inspection.values import LOSS, Range, Value, ranges_before
from crossframe.recording import Recording
from crossframe.recording.event_format import (
    BACKWARD,
    BUFFERS,
    FORWARD,
    INPUT,
    NORM,
    PARAMETERS,
    REDUCE,
    UPDATE,
    before_step,
)


@dataclass(frozen=True)
class NotFinite:
    """The first value of a run that is not finite.

    Attributes:
        ranks: all ranks on which it is not finite.
        skipped: whether the optimizer did not change any parameter in this step.
        inputs: ranges of the values that it was computed from.
        unseen: (start, stop) of steps that were not recorded in enough detail, in which it may have appeared first; None if there
            are none.
    """

    step: int
    microbatch: int
    ranks: tuple[int, ...]
    phase: str
    name: str
    module: str
    parameter: str
    num_not_finite: int
    numel: int
    skipped: bool
    inputs: tuple[Range, ...]
    unseen: tuple[int, int] | None

    def describe(self) -> str:
        """The finding in a sentence."""
        at = f"step {self.step}, rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks[:8]))}"
        if self.module and self.microbatch:
            at += f", microbatch {self.microbatch}"
        text = f"{at}: the {self.name} is the first value that is not finite ({self.num_not_finite} of {self.numel} elements)"
        if self.inputs:
            text += f"; it was computed from the {'; '.join(each.describe() for each in self.inputs)}"
        if self.skipped:
            text += "; the optimizer left all parameters as they were, as a gradient scaler does"
        if self.unseen is not None:
            start, stop = self.unseen
            window = f"windows=[({start}, {stop})] (--window {start}:{stop})"
            text += f"; what causes it at steps {start} to {stop - 1} was not all recorded: record again with {window}"
        return text

    def to_json(self) -> dict:
        """The finding as a JSON object."""
        return {**asdict(self), "ranks": list(self.ranks), "description": self.describe()}


def first_not_finite(recording: Recording, steps: Mapping[int, Sequence[Value]]) -> tuple[list[NotFinite], list[str]]:
    """The first step that was skipped because of values that are not finite, the first that was not, and notes on harmless ones.

    Args:
        recording: the recording.
        steps: all recorded values, by step, causes first.
    """
    found: list[NotFinite] = []
    notes: list[str] = []
    for step, values in steps.items():
        bad = [value for value in values if value.num_not_finite]
        if not bad:
            continue
        first = bad[0]
        effects = [value for value in bad if value.phase not in (FORWARD, BUFFERS) or value.use == LOSS]
        if not effects:
            if not notes:
                notes.append(
                    f"step {step}: the {first.name} holds {first.num_not_finite} values that are not finite, without an effect "
                    "on losses, gradients and parameters, as in a mask"
                )
            continue
        skipped = all(each.phase in (FORWARD, BACKWARD, REDUCE, NORM) for each in effects) and _stood_still(
            recording, step
        )
        if skipped and any(each.skipped for each in found):
            continue
        found.append(_found(recording, first, bad, skipped))
        if not skipped:
            break
    return found, notes


def _found(recording: Recording, first: Value, bad: list[Value], skipped: bool) -> NotFinite:
    same = [each for each in bad if each.name == first.name and each.microbatch == first.microbatch]
    return NotFinite(
        first.step,
        first.microbatch,
        tuple(sorted({each.rank for each in same})),
        first.phase,
        first.name,
        first.module,
        first.parameter,
        sum(each.num_not_finite for each in same),
        sum(each.numel for each in same),
        skipped,
        ranges_before(recording, first),
        _unseen(recording, first),
    )


def _stood_still(recording: Recording, step: int) -> bool:
    """Whether the step changed no parameter; False if that was not recorded."""
    before = before_step(step)
    names = [name for name in recording.manifest.params if recording.has(UPDATE, step, name)]
    if not names or not all(recording.has(*before, name) for name in names):
        return False
    return all(_bits(recording, *before, name) == _bits(recording, UPDATE, step, name) for name in names)


def _bits(recording: Recording, phase: str, step: int, name: str) -> list[tuple[int, int]]:
    parts = recording.ranges(phase, step, name)
    return [(part.rank, recording.sketch_of(step, name, part).fingerprint) for part in parts]


def _unseen(recording: Recording, first: Value) -> tuple[int, int] | None:
    """The steps that may have the cause, if some of them were not recorded in detail."""
    start = first.step
    recorded = set(recording.recorded_steps())
    while start and start - 1 not in recorded:
        start -= 1
    dense = recording.activations(first.step)
    from_input = first.phase == FORWARD and first.use == INPUT
    if start == first.step and (dense or from_input or first.phase in (PARAMETERS, UPDATE)):
        return None
    return start, first.step + 1
