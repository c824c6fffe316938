"""Tells two runs that start from other values from one run whose initial values were moved wrongly."""

import numpy as np

from crossframe.recording import Recording
from crossframe.recording.lines import PARAMETERS
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.measure.sides import Sides, put_together

# Values drawn from another seed correlate with one another by about 1 / sqrt(numel); rounded or shifted ones by far more.
_RELATED = 0.5


def parted_replica(recording: Recording) -> tuple[int, str] | None:
    """The first copy of the model that starts from other values than copy 0, and the first parameter that shows it.

    Returns:
        (replica, parameter), or None if all copies start alike, as they must.
    """
    for replica in range(1, recording.manifest.mesh.replicate):
        for name, spec in recording.manifest.params.items():
            if spec.numel and recording.has(PARAMETERS, 0, name):
                first, other = (put_together(recording, PARAMETERS, 0, name, replica=i) for i in (0, replica))
                if not first.sketched(name).equals(other.sketched(name)):
                    return replica, name
    return None


def other_start(pair: Pair) -> tuple[str, ...]:
    """The parameters whose initial values the two runs drew differently.

    Returns:
        Their names, in the order of forward. Empty if initial values are equal, or if those that differ are related: the same
        values at other places, or correlated by more than a half on average over elements. Such values were moved or rounded.
    """
    names, related, numel = [], 0.0, 0
    for name in pair.names():
        if not all(recording.has(PARAMETERS, 0, name) for recording in (pair.a, pair.b)):
            continue
        a, b, sketches = sides = pair.put_together(PARAMETERS, 0, name, (0, 0))
        if sketches[0].equals(sketches[1]) if sketches else np.array_equal(a, b, equal_nan=True):
            continue
        if _same_values(sides):
            return ()
        names.append(name)
        related += a.size * _correlation(sides)
        numel += a.size
    return tuple(names) if numel and related < _RELATED * numel else ()


def _same_values(sides: Sides) -> bool:
    a, b, sketches = sides
    return sketches is None and a.size > 1 and np.array_equal(np.sort(a, None), np.sort(b, None), equal_nan=True)


def _correlation(sides: Sides) -> float:
    """Of elements, each side's mean left out; of the sums of sketches, whose expectation is zero. 0 where a side is constant."""
    a, b = (np.asarray(side, np.float64).reshape(-1) for side in sides[:2])
    if sides[2] is None:
        a, b = a - a.mean(), b - b.mean()
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / size if np.isfinite(size) and size else 0.0
