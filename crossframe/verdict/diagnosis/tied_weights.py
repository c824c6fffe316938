"""Fits how often each use of a tied weight (embedding and head) contributes to its gradient (R31).

The gradient is E + H: E from the lookup, nonzero only in rows of tokens that occurred, and H from the head, nonzero in all rows.
A wrong gradient is alpha E + beta H. Without knowing E and H:

- in rows that were not looked up, E is zero, so wrong = beta * right there;
- if the head's outputs enter a softmax cross entropy, the gradient of the logits sums to zero over the vocabulary, because
  probabilities and targets both sum to one. So the rows of H sum to zero, and the sum of rows of wrong is alpha times the sum of
  rows of right.

So alpha and beta are each the factor between two vectors, with their own residuals.
"""

from dataclasses import dataclass

import numpy as np

from crossframe.verdict.diagnosis.fit import Contrast, factor_between
from crossframe.verdict.measure.metrics import distance, norm

COUNTS = (0, 1, 2)


@dataclass(frozen=True)
class Uses:
    """How often each use contributes to the wrong gradient.

    Attributes:
        looked_up: alpha; None if the sum of rows does not determine it.
        all_rows: beta.
        num_rows: number of rows that were looked up.
        residual: of both factors together.
    """

    looked_up: int | None
    all_rows: int
    num_rows: int
    residual: float


def uses_of(sides: Contrast, rows: np.ndarray | None = None) -> Uses | None:
    """How often each use contributes, if not once each.

    An error of norm `limit` changes a sum over r rows by at most sqrt(r) * limit (Cauchy-Schwarz).

    Args:
        rows: mask of the rows that were looked up; None for the rows in which the sides differ, which is correct if the head
            contributes once.
    """
    right, wrong = sides.right, sides.wrong
    if right.ndim != 2:
        return None
    apart = np.sqrt(np.square(wrong - right).sum(axis=1))
    found = apart > sides.limit / np.sqrt(len(apart)) if rows is None else rows
    never = ~found
    all_rows = _count(right[never], wrong[never], sides.limit)
    if all_rows is None:
        return None
    sums = right.sum(axis=0), wrong.sum(axis=0)
    looked_up = _count(*sums, sides.limit * np.sqrt(len(right)))
    residual = distance(wrong[never], all_rows * right[never])
    if looked_up is None:
        # Without a softmax the sums are not multiples of one another; only the rows that were looked up differ.
        factor = factor_between(*sums)
        softmax = distance(sums[1], factor * sums[0]) <= sides.limit * np.sqrt(len(right)) * (1 + abs(factor))
        alone = all_rows == 1 and norm(apart[found]) > sides.limit and not softmax
        return Uses(None, 1, int(found.sum()), residual) if alone else None
    if looked_up == all_rows:
        return None
    residual = float(np.hypot(residual, distance(sums[1], looked_up * sums[0]) / np.sqrt(len(right))))
    return Uses(looked_up, all_rows, int(found.sum()), residual)


def _count(right: np.ndarray, wrong: np.ndarray, tolerance: float) -> int | None:
    """The factor in COUNTS between two arrays; None if there is none or it is not unique."""
    if norm(right) <= 4 * tolerance:
        return None  # several counts could fit
    return next((n for n in COUNTS if distance(wrong, n * right) <= tolerance * (n + max(1, n))), None)


def rows_looked_up(weight: np.ndarray, outputs: np.ndarray) -> np.ndarray | None:
    """Mask of the rows of a weight that occur bitwise in an output; None if some vector is not a row, so it is not an embedding's
    output.

    >>> weight = np.eye(3)
    >>> rows_looked_up(weight, weight[[2, 0, 2]]).tolist()
    [True, False, True]
    """
    if weight.ndim != 2 or outputs.ndim < 2 or weight.dtype != outputs.dtype:
        return None
    lines = {row.tobytes(): i for i, row in enumerate(np.ascontiguousarray(weight))}
    found = np.zeros(len(weight), bool)
    for vector in np.ascontiguousarray(outputs).reshape(-1, outputs.shape[-1]):
        place = lines.get(vector.tobytes())
        if place is None:
            return None
        found[place] = True
    return found
