"""Finds series that grow from step to step: the loss, the gradient, the parameters of a unit, the outputs of a module.

A series grows if each of its last m values is larger than the previous one, and if it has at least doubled. In a random order
of m values the former has a probability of 1 / m!, and m is the smallest number for which this probability, over all series
together, is at most `FALSE_GROWTH`. A series that ends at a thousand times its smallest value is always reported.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from crossframe.inspection.values import LOSS, Value
from crossframe.recording import Recording
from crossframe.recording.event_format import OUTPUT, REDUCE, UPDATE

FALSE_GROWTH = 1e-3
LEAST_GROWTH = 2.0
EXPLOSION = 1000.0


@dataclass(frozen=True)
class Growth:
    """A series that grows.

    Attributes:
        name: name of the quantity.
        start, stop: the first step of the growth, and the last step with a value.
        first, last: the values at these steps.
        factor: the average factor of growth per step.
    """

    name: str
    start: int
    stop: int
    first: float
    last: float
    factor: float

    def describe(self) -> str:
        """The finding in a sentence.

        >>> Growth("gradient norm", 4, 10, 1.0, 64.0, 2.0).describe()
        'the gradient norm grows from step 4 on by a factor of 2 a step, from 1 to 64 at step 10'
        """
        return (
            f"the {self.name} grows from step {self.start} on by a factor of {self.factor:.4g} a step, from {self.first:.4g} to "
            f"{self.last:.4g} at step {self.stop}"
        )

    def to_json(self) -> dict:
        """The finding as a JSON object."""
        return {**asdict(self), "description": self.describe()}


def growth(recording: Recording, steps: Mapping[int, Sequence[Value]]) -> list[Growth]:
    """The series that grow, the fastest first.

    Args:
        recording: the recording.
        steps: all recorded values, by step.
    """
    series = _series(recording, steps)
    least = least_rises(len(series))
    found = [grown for name, points in series.items() if (grown := _of_series(name, points, least)) is not None]
    return sorted(found, key=lambda each: -each.factor)


def least_rises(num_series: int) -> int:
    """The length of a rising end of a series that is significant among so many series.

    >>> least_rises(1), least_rises(100)
    (7, 9)
    """
    return next(length for length in itertools.count() if math.factorial(length) * FALSE_GROWTH >= num_series)


def _of_series(name: str, points: Sequence[tuple[int, float]], least: int) -> Growth | None:
    points = [point for point in points if point[1] > 0 and math.isfinite(point[1])]
    if not points:
        return None
    at = len(points) - 1
    while at and points[at - 1][1] < points[at][1]:
        at -= 1
    rises = len(points) - at >= least and points[-1][1] >= LEAST_GROWTH * points[at][1]
    if not rises:
        at = min(range(len(points)), key=lambda i: points[i][1])
        if points[-1][1] < EXPLOSION * points[at][1]:
            return None
    (start, first), (stop, last) = points[at], points[-1]
    return Growth(name, start, stop, first, last, (last / first) ** (1 / (stop - start)))


def _series(recording: Recording, steps: Mapping[int, Sequence[Value]]) -> dict[str, list[tuple[int, float]]]:
    """The series as (step, value), by name. Norms are over all microbatches and all ranks of one replica."""
    found: dict[str, list[tuple[int, float]]] = {}
    shard = recording.manifest.mesh.shard
    for step, values in steps.items():
        sums: dict[str, list[float]] = {}
        for value in values:
            for name, is_number in _names(recording, value, shard):
                sums.setdefault(name, [0.0, 0.0])
                total = sums[name][0]
                sums[name][0] = (
                    total + value.norm if is_number else math.hypot(total, value.norm)
                )  # squares may overflow
                sums[name][1] += 1 if is_number else 0
                if value.num_not_finite:
                    sums[name][0] = math.nan
        for name, (total, count) in sums.items():
            found.setdefault(name, []).append((step, total / count if count else total))
    return found


def _names(recording: Recording, value: Value, shard: int) -> list[tuple[str, bool]]:
    """The series that a value belongs to, and whether they average values instead of adding squares."""
    if value.use == LOSS:
        return [("loss", True)]
    if value.use == OUTPUT:
        return [(f"norm of the {value.name}", False)]
    # Initial values are left out, since the series has the updated values of the same step.
    if value.rank >= shard or value.phase not in (REDUCE, UPDATE):
        return []
    unit = recording.manifest.unit_of[value.parameter] or "(root)"
    if value.phase == REDUCE:
        return [("gradient norm", False), (f"gradient norm of unit {unit!r}", False)]
    return [(f"norm of the parameters of unit {unit!r}", False)]
