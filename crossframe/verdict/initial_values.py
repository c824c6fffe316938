"""Distinguishes two runs with different initial values from one run whose initial values were moved incorrectly."""

import numpy as np

from crossframe.recording import Recording
from crossframe.recording.event_format import PARAMETERS
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.measure.values import Sides, assemble

# Values from different seeds have a correlation of about 1 / sqrt(numel); rounded or shifted values have a much larger one.
_RELATED = 0.5


def differing_replica(recording: Recording) -> tuple[int, str] | None:
    """The first (replica, parameter) whose initial value differs from replica 0; None if all replicas are equal, as they must
    be."""
    for replica in range(1, recording.manifest.mesh.replicate):
        for name, spec in recording.manifest.params.items():
            if spec.numel and recording.has(PARAMETERS, 0, name):
                first, other = (assemble(recording, PARAMETERS, 0, name, replica=i) for i in (0, replica))
                if not first.sketched().equals(other.sketched()):
                    return replica, name
    return None


def unrelated_parameters(pair: Pair) -> tuple[str, ...]:
    """The parameters whose initial values the two runs drew independently.

    Returns:
        Their names in forward order. Empty if initial values are equal, or if differing ones are related: a permutation, or a
        correlation above 1/2 on average over elements. Related values were moved or rounded.
    """
    names, related, numel = [], 0.0, 0
    for name in pair.names():
        if not pair.has(PARAMETERS, 0, name):
            continue
        a, b, sketches = sides = pair.assemble(PARAMETERS, 0, name, (0, 0))
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
    """The correlation of elements, or of the sums of sketches, whose mean is zero; 0 if a side is constant."""
    a, b = (np.asarray(side, np.float64).reshape(-1) for side in sides[:2])
    if sides[2] is None:
        a, b = a - a.mean(), b - b.mean()
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / size if np.isfinite(size) and size else 0.0
