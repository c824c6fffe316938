"""What was not recorded ahead of a divergence. Its cause may lie there."""

from dataclasses import dataclass

from crossframe.recording.lines import BACKWARD, FORWARD, NORM, REDUCE
from crossframe.verdict.measure.locate import Divergence
from crossframe.verdict.measure.pair import Pair


@dataclass(frozen=True)
class Unseen:
    """Steps at one of which a divergence began, but which were not recorded well enough to say where.

    Attributes:
        start, stop: of the steps. The last of them is that of the divergence.
        again: whether a run that records them densely would show more.
    """

    start: int
    stop: int
    again: bool

    def in_words(self) -> str:
        """What is known of the cause, and what would tell more."""
        last = self.stop - 1
        if self.start < last:
            said = (
                f"it began at one of the steps {self.start} to {last}: of those before {last} only losses were recorded"
            )
        else:
            said = "everything recorded that causes it agrees, but what happened inside of the step was not recorded"
        if not self.again:
            return said
        steps = f"windows=[({self.start}, {self.stop})] (--window {self.start}:{self.stop})"
        return f"{said}; to see where, record both again with {steps}"


def unseen(pair: Pair, where: Divergence) -> Unseen | None:
    """What was not recorded of what may cause a divergence; None where all of it was."""
    start = stop = where.step
    while start and start - 1 not in pair.steps:
        start -= 1
    steps = range(start, stop + 1)
    if start == stop and _is_seen(pair, where):
        return None
    return Unseen(start, stop + 1, any(not _is_planned(pair, step) for step in steps))


def _is_seen(pair: Pair, where: Divergence) -> bool:
    """Whether both recorded what, within the step, comes right before."""
    if where.phase == NORM:
        return where.step in pair.steps
    if where.phase == REDUCE and pair.same_world and where.parameter is not None:
        name = where.parameter
        return all(recording.has(BACKWARD, where.step, name, where.rank) for recording in (pair.a, pair.b))
    if where.phase in (FORWARD, BACKWARD, REDUCE):
        return all(recording.activations(where.step) for recording in (pair.a, pair.b))
    return True


def _is_planned(pair: Pair, step: int) -> bool:
    """Whether both recordings are dense there already: what is missing, no recording of such runs has."""
    return all(recording.manifest.schedule.is_dense(step) for recording in (pair.a, pair.b))
