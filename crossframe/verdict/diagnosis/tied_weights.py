"""A weight with two uses, an embedding and a head say, of which one counts once too often or not at all (R31).

Its gradient is E + H: E from looking rows up, nonzero only in the rows of tokens that occurred, and H from the head, nonzero in
all rows. A wrong one is alpha E + beta H. Two things about E and H are known without having either:

- in rows that were never looked up, E is zero: there wrong = beta * right;
- where the head's outputs go through a softmax into a cross entropy, the gradient with respect to the logits sums to zero over
  the vocabulary, as probabilities and targets both sum to one. So the rows of H sum to zero, and
  sum of rows of wrong = alpha * sum of rows of right.

So alpha and beta are each the factor between two vectors, and each has a rest of its own.
"""

from dataclasses import dataclass

import numpy as np

from crossframe.verdict.diagnosis.fit import Contrast, factor_between
from crossframe.verdict.measure.metrics import distance, norm

COUNTS = (0, 1, 2)


@dataclass(frozen=True)
class Uses:
    """How often the wrong side counts what comes from rows that are looked up, and from the use of all rows.

    Attributes:
        looked_up: alpha; None where the sum of rows does not tell.
        all_rows: beta.
        num_rows: how many rows were looked up.
        rest: of both factors together.
    """

    looked_up: int | None
    all_rows: int
    num_rows: int
    rest: float


def uses_of(sides: Contrast, rows: np.ndarray | None = None) -> Uses | None:
    """How often each use counts, where that is another number than once.

    Args:
        rows: which rows were looked up, bool of shape (rows,); None: those in which the sides differ, which tells as long as the
            head's use is as it should be.

    An error of the sides of norm `limit` moves a sum over r rows by at most sqrt(r) * limit (Cauchy and Schwarz).
    """
    right, wrong = sides.right, sides.wrong
    if right.ndim != 2 or not norm(right):
        return None
    apart = np.sqrt(np.square(wrong - right).sum(axis=1))
    found = apart > sides.limit / np.sqrt(len(apart)) if rows is None else rows
    never = ~found
    if not found.any() or not never.any():
        return None
    all_rows = _count(right[never], wrong[never], sides.limit)
    if all_rows is None:
        return None
    sums = right.sum(axis=0), wrong.sum(axis=0)
    looked_up = _count(*sums, sides.limit * np.sqrt(len(right)))
    rest = distance(wrong[never], all_rows * right[never])
    if looked_up is None:
        # No softmax, whose sums would be multiples of one another: what is left is that the rows that were looked up differ, and
        # they alone.
        factor = factor_between(*sums)
        softmax = distance(sums[1], factor * sums[0]) <= sides.limit * np.sqrt(len(right)) * (1 + abs(factor))
        alone = all_rows == 1 and norm(apart[found]) > sides.limit and not softmax
        return Uses(None, 1, int(found.sum()), rest) if alone else None
    if looked_up == all_rows:
        return None
    rest = float(np.hypot(rest, distance(sums[1], looked_up * sums[0]) / np.sqrt(len(right))))
    return Uses(looked_up, all_rows, int(found.sum()), rest)


def _count(right: np.ndarray, wrong: np.ndarray, tolerance: float) -> int | None:
    """Which of COUNTS the factor between two arrays is; None if none, or if it cannot be told."""
    if norm(right) <= 4 * tolerance:
        return None
    # Then no two of them can both fit.
    return next((n for n in COUNTS if distance(wrong, n * right) <= tolerance * (n + max(1, n))), None)


def rows_looked_up(weight: np.ndarray, outputs: np.ndarray) -> np.ndarray | None:
    """Which rows of a weight lie among the vectors of an output, bit for bit: bool of shape (rows,). None if some vector is no
    row: then it is not the output of an embedding.

    >>> weight = np.eye(3)
    >>> rows_looked_up(weight, weight[[2, 0, 2]]).tolist()
    [True, False, True]
    """
    if weight.ndim != 2 or outputs.ndim < 2 or outputs.shape[-1] != weight.shape[-1] or weight.dtype != outputs.dtype:
        return None
    lines = {row.tobytes(): i for i, row in enumerate(np.ascontiguousarray(weight))}
    found = np.zeros(len(weight), bool)
    for vector in np.ascontiguousarray(outputs).reshape(-1, outputs.shape[-1]):
        place = lines.get(vector.tobytes())
        if place is None:
            return None
        found[place] = True
    return found
