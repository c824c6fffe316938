"""Fits differences within a layer: positions, padding in a norm's mean or in pooling."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from crossframe.verdict.diagnosis.fit import Contrast, accepted, factor_between, first_accepted, is_uninformative
from crossframe.verdict.diagnosis.module_fits import Normed, one_side
from crossframe.verdict.measure.metrics import distance, norm

MOST_ROWS = 4
"""The largest shift of positions that is tried."""
MOST_PADDING = 64
"""The largest amount of padding that is tried."""


@dataclass(frozen=True)
class Positions:
    """The wrong side looks up rows of a table that are `rows` later (earlier if negative)."""

    rows: int
    residual: float
    error: float


def positions_off(sides: Contrast, table: np.ndarray) -> Positions | None:
    """The k of wrong - right = table[k : k + T] - table[:T], for activations of shape (..., T, width); None if there is none.

    This holds for the output of a position embedding and sums that contain it. Two sums of two numbers round by 4 u of the
    result.

    Args:
        table: at least T rows.
    """
    x, y = sides.right, sides.wrong
    length = x.shape[-2]
    for by in [sign * k for k in range(1, MOST_ROWS + 1) for sign in (1, -1)]:
        # The values used instead of rows outside the table are unknown.
        low, high = max(0, -by), min(length, len(table) - by)
        if 2 * (high - low) < length or high - low < 2:
            continue
        step = table[low + by : high + by] - table[low:high]
        if is_uninformative(step, 2 * sides.limit):
            continue
        right, wrong = x[..., low:high, :], y[..., low:high, :]
        residual, error = distance(wrong, right + step), 4 * sides.roundoff * norm(y)
        if accepted(residual, distance(wrong, right), sides.limit + error):
            return Positions(by, residual, sides.limit + error)
    return None


@dataclass(frozen=True)
class Rows:
    """Positions of which one side looks up other rows.

    Attributes:
        shifts: by how many rows, in any sample, the most frequent first.
        num_shifted, total: the number of positions that are shifted, and of all positions.
    """

    shifts: tuple[int, ...]
    num_shifted: int
    total: int


def rows_off(sides: Contrast, table: np.ndarray) -> Rows | None:
    """The shifts of positions whose rows in a table were looked up, for outputs of shape (..., T, width) of both sides.

    All elements of both sides must be rows of the table, bit for bit. In most samples most rows must be consecutive on both
    sides, as positions are and tokens are not, and shifted by the same number. The others, such as those of padding, may be any.
    """
    x, y = sides.right, sides.wrong
    if x.shape[-2] < 3:
        return None
    where = {row.tobytes(): i for i, row in enumerate(table)}
    if len(where) < len(table):
        return None  # equal rows do not tell positions apart
    rows = [[where.get(row.tobytes(), -1) for row in np.ascontiguousarray(s).reshape(-1, x.shape[-1])] for s in (x, y)]
    first, second = (np.array(found).reshape(-1, x.shape[-2]) for found in rows)
    if first.min() < 0 or second.min() < 0:
        return None
    shifts: Counter[int] = Counter()
    alike = 0
    for one, other in zip(first, second, strict=True):
        follows = (np.diff(one) == 1) & (np.diff(other) == 1)
        by, count = Counter((other - one).tolist()).most_common(1)[0]
        if 2 * follows.sum() >= len(follows) and 2 * count > len(one):
            shifts[by] += count
            alike += 1
    del shifts[0]
    if 2 * alike <= len(first) or not shifts:
        return None
    return Rows(tuple(by for by, _ in shifts.most_common()), shifts.total(), first.size)


@dataclass(frozen=True)
class Padded:
    """A norm whose mean includes padding.

    Attributes:
        counted: the number of elements in the wrong side's mean.
    """

    text: str
    numel: int
    counted: int
    residual: float
    error: float


def padded_norm(
    sides: Contrast,
    inputs: tuple[np.ndarray, np.ndarray],
    weight: np.ndarray,
    bias: np.ndarray | None,
    roundoff: float,
) -> Padded | None:
    """Fit the number of elements, including zero padding, in the wrong side's mean; the right side's mean has no padding.

    Returns None if a constant factor explains the difference as well.

    Args:
        inputs: of the right and the wrong side.
    """
    x, y = inputs[1], sides.wrong
    if x.shape != y.shape or x.shape[-1:] != (weight.size,):
        return None
    numel, w, b = weight.size, weight.reshape(-1), 0.0 if bias is None else bias.reshape(-1)
    for text, centred in (("layer norm", True), ("RMS norm", False)):
        kind = Normed(text, (x.ndim - 1,), centred, x.ndim - 1)
        right = one_side(kind, inputs[0], sides.right, w, b, roundoff)
        if right is None or not right[0].under_root:
            continue
        residuals = {
            counted: distance(y, _normed(kind, x, w, b, right[0].value, counted))
            for counted in range(numel + 1, numel + MOST_PADDING + 1)
        }
        counted = min(residuals, key=residuals.__getitem__)
        error = roundoff * 12 * norm(y) + sides.limit
        as_factor = sides.residual(factor_between(sides.right, y) * sides.right)
        if accepted(residuals[counted], sides.difference, error) and 2 * residuals[counted] < as_factor:
            return Padded(kind.text, numel, counted, residuals[counted], error)
    return None


def _normed(
    kind: Normed, x: np.ndarray, w: np.ndarray, b: np.ndarray | float, epsilon: float, counted: int
) -> np.ndarray:
    mean = x.sum(axis=-1, keepdims=True) / counted if kind.centred else 0.0
    squares = np.square(x - mean).sum(axis=-1, keepdims=True) + (counted - x.shape[-1]) * np.square(mean)
    return (x - mean) / np.sqrt(squares / counted + epsilon) * w + b


@dataclass(frozen=True)
class Pooled:
    """What the right side takes of each sequence, and what the wrong side takes instead.

    Attributes:
        text, wrong: templates for the positions.
        counted, total: the number of positions of the right side, and of all positions.
    """

    text: str
    wrong: str
    counted: int
    total: int
    residual: float
    error: float


def pooled(sides: Contrast, inputs: tuple[np.ndarray, np.ndarray]) -> Pooled | None:
    """Fit how a sequence was pooled: over the first positions of each sample on the right side, over all on the wrong side.

    Args:
        inputs: (batch, positions, width) of the right and the wrong side.
    """
    x, y = inputs
    length = x.shape[1]
    number = np.arange(1, length + 1)[:, None]
    error = sides.limit + (length + 2) * sides.roundoff * norm(np.abs(x).mean(axis=1))
    ways = {
        "has the mean over {}": lambda z: np.cumsum(z, axis=1) / number,
        "has the maximum over {}": lambda z: np.maximum.accumulate(z, axis=1),
        "has the last of {}": lambda z: z,
    }
    for text, prefixes in ways.items():
        apart = np.sqrt(np.square(prefixes(x) - sides.right[:, None]).sum(axis=-1))
        last = length - 1 - apart[:, ::-1].argmin(axis=1)  # more positions may have the same maximum
        if norm(apart.min(axis=1)) > error or (last == length - 1).all():
            continue
        counted = int((last + 1).sum())
        seen = np.arange(length)[None, :, None] <= last[:, None, None]
        instead = [(text, prefixes(y)[:, -1])]
        if "mean" in text:
            instead.append(("divides its sum by the number of {}", (y * seen).mean(axis=1)))
        if found := first_accepted(sides, instead, error):
            return Pooled(text, found[0], counted, last.size * length, found[1], error)
    return None
