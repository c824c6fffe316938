"""Steps before a divergence that were not recorded and may contain its cause."""

from dataclasses import dataclass

from crossframe.recording.event_format import BACKWARD, BUFFERS, FORWARD, NORM, REDUCE
from crossframe.verdict.measure.locate import Divergence
from crossframe.verdict.measure.pair import Pair


@dataclass(frozen=True)
class Unrecorded:
    """A range of steps that contains the cause of a divergence but was not recorded in sufficient detail.

    Attributes:
        start, stop: the range of steps; the divergence is at the last one.
        again: whether recording these steps densely would show more.
    """

    start: int
    stop: int
    again: bool

    def describe(self) -> str:
        """The possible steps of the cause, and which option records them, as a clause."""
        last = self.stop - 1
        if self.start < last:
            text = f"it began at one of the steps {self.start} to {last}: only losses were recorded before step {last}"
        else:
            text = "all recorded causes agree, but the inside of the step was not recorded"
        if not self.again:
            return text
        steps = f"windows=[({self.start}, {self.stop})] (--window {self.start}:{self.stop})"
        return f"{text}; to locate it, record both again with {steps}"


def unseen(pair: Pair, where: Divergence) -> Unrecorded | None:
    """The unrecorded steps that may contain the cause of a divergence; None if its causes were recorded."""
    start = stop = where.step
    while start and start - 1 not in pair.steps:
        start -= 1
    steps = range(start, stop + 1)
    if start == stop and _is_seen(pair, where):
        return None
    return Unrecorded(start, stop + 1, any(not _is_planned(pair, step) for step in steps))


def _is_seen(pair: Pair, where: Divergence) -> bool:
    """Whether both recorded the direct causes within the step."""
    if where.phase == NORM:
        return where.step in pair.steps
    if where.phase == REDUCE and pair.by_rank:
        assert where.parameter is not None
        return all(recording.has(BACKWARD, where.step, where.parameter, where.rank) for recording in (pair.a, pair.b))
    if where.phase in (FORWARD, BACKWARD, REDUCE, BUFFERS):
        return all(recording.activations(where.step) for recording in (pair.a, pair.b))
    return True


def _is_planned(pair: Pair, step: int) -> bool:
    """Whether both recordings are already dense at this step, so that recording again would not show more."""
    return all(recording.manifest.schedule.is_dense(step) for recording in (pair.a, pair.b))
