"""Fits differences within a layer: positions, the scale of attention, padding in a norm's mean, the weight of another layer."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from crossframe.verdict.diagnosis.fit import Contrast, accepted, factor_between, is_uninformative
from crossframe.verdict.diagnosis.module_fits import Normed, one_side
from crossframe.verdict.measure.metrics import distance, norm

MOST_ROWS = 4
"""The largest shift of positions that is tried."""
MOST_PADDING = 64
"""The largest amount of padding that is tried."""
MOST_ELEMENTS = 1 << 20


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
    """
    x, y = sides.right, sides.wrong
    if table.ndim != 2 or x.ndim < 2 or x.shape[-1] != table.shape[1] or not 1 < x.shape[-2] <= len(table):
        return None
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
class Attention:
    """The scale of attention scores on both sides.

    Attributes:
        right, wrong: the factor of q k.
        uncertainty: the bound on the error of the wrong one.
    """

    heads: int
    causal: bool
    right: float
    wrong: float
    uncertainty: float
    residual: float
    error: float


def attention_of(sides: Contrast, inputs: Sequence[Sequence[np.ndarray]], roundoff: float) -> Attention | None:
    """Fit the scale of attention scores; None if the sides are not attention of these projections with different scales.

    The right side must be softmax(q k / sqrt(head width)) v; the wrong side's factor is fitted. A sum of n products has an error
    of n u; there are two of them and a softmax over T terms.

    Args:
        inputs: (q, k, v) of the right and the wrong side, each of shape (batch, T, width) like the sides.
        roundoff: unit roundoff of the compute dtype.
    """
    x = sides.right
    if x.ndim != 3 or x.size > MOST_ELEMENTS or x.shape[1] < 2:
        return None
    width, length = x.shape[2], x.shape[1]
    for heads in [h for h in range(1, min(width, 64) + 1) if width % h == 0 and width // h > 1]:
        usual = 1 / math.sqrt(width // heads)
        error = 8 * (width // heads + length) * roundoff * norm(x)
        for causal in (True, False):
            if distance(x, _attend(inputs[0], heads, usual, causal)) > sides.limit + error:
                continue
            factor, residual = _fitted(sides.wrong, inputs[1], heads, usual, causal)
            near = _attend(inputs[1], heads, factor * (1 + 1e-4), causal)
            steep = distance(near, _attend(inputs[1], heads, factor, causal)) / (1e-4 * factor)
            if steep and accepted(residual, sides.difference, sides.limit + error):
                uncertainty = (sides.limit + error) / steep
                return Attention(heads, causal, usual, factor, uncertainty, residual, sides.limit + error)
    return None


def _attend(inputs: Sequence[np.ndarray], heads: int, factor: float, causal: bool) -> np.ndarray:
    q, k, v = (x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2) for x in inputs)
    scores = factor * (q @ k.swapaxes(2, 3))
    if causal:
        scores = np.where(np.tri(scores.shape[-1], dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (shares / shares.sum(axis=-1, keepdims=True) @ v).swapaxes(1, 2).reshape(inputs[0].shape)


def _fitted(y: np.ndarray, inputs: Sequence[np.ndarray], heads: int, usual: float, causal: bool) -> tuple[float, float]:
    """(best-fitting factor, residual), by a coarse search followed by Gauss-Newton."""

    def residual(factor: float) -> float:
        return distance(y, _attend(inputs, heads, factor, causal))

    best = min((usual * 2.0**i for i in np.arange(-8, 8.5, 0.5)), key=residual)
    for _ in range(30):
        now = _attend(inputs, heads, best, causal)
        slope = (_attend(inputs, heads, best * (1 + 1e-6), causal) - now) / (1e-6 * best)
        step = factor_between(slope, y - now)
        if (
            not math.isfinite(step)
            or abs(step) <= 1e-13 * best
            or best + step <= 0
            or residual(best + step) >= residual(best)
        ):
            break
        best += step
    return best, residual(best)


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
    if x.ndim < 2 or x.shape[-1] != weight.size:
        return None
    numel, b = x.shape[-1], 0.0 if bias is None else bias
    for kind in (
        Normed("layer norm", (x.ndim - 1,), True, x.ndim - 1),
        Normed("RMS norm", (x.ndim - 1,), False, x.ndim - 1),
    ):
        right = one_side(kind, inputs[0], sides.right, weight, b, roundoff, sides.limit)
        if right is None or not right[0].under_root:
            continue
        residuals = {
            counted: distance(y, _normed(kind, x, weight, b, right[0].value, counted))
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


def other_kernel(
    sides: Contrast,
    inputs: tuple[np.ndarray, np.ndarray],
    own: tuple[np.ndarray, np.ndarray | None],
    others: Mapping[str, tuple[np.ndarray, np.ndarray | None]],
    roundoff: float,
) -> tuple[str, float, float] | None:
    """(module, residual, error) of the other module whose weight the wrong side uses; the right side uses its own.

    Args:
        own: weight of shape (out, in) and bias of this module.
        others: the same of other modules, by name.
    """

    def times(x: np.ndarray, pair: tuple[np.ndarray, np.ndarray | None]) -> np.ndarray:
        return x @ pair[0].T + (0.0 if pair[1] is None else pair[1])

    weight, bias = own
    if weight.ndim != 2 or inputs[0].shape[-1] != weight.shape[1] or sides.right.shape[-1] != weight.shape[0]:
        return None
    sizes = times(np.abs(inputs[1]), (np.abs(weight), None if bias is None else np.abs(bias)))
    error = sides.limit + (weight.shape[1] + 2) * roundoff * norm(sizes)
    if distance(sides.right, times(inputs[0], own)) > error:
        return None
    return next(_explained(sides, {name: times(inputs[1], other) for name, other in others.items()}, error), None)


def other_scale(
    sides: Contrast,
    inputs: tuple[np.ndarray, np.ndarray],
    own: tuple[np.ndarray, np.ndarray | None],
    others: Mapping[str, tuple[np.ndarray, np.ndarray | None]],
) -> tuple[str, float, float] | None:
    """`other_kernel` for a norm, whose weight multiplies the last dim. Both inputs must be equal."""
    weight, bias = own
    if weight.ndim != 1 or sides.right.shape[-1] != weight.size or not weight.all():
        return None
    normed = (sides.right - (0.0 if bias is None else bias)) / weight
    predicted, error = {}, 0.0
    for name, (theirs, shift) in others.items():
        predicted[name] = normed * theirs + (0.0 if shift is None else shift)
        error = max(error, sides.limit * (1 + float(np.abs(theirs / weight).max())))
    if distance(*inputs) > error * norm(inputs[0]) / max(norm(sides.right), np.finfo(float).tiny):
        return None
    return next(_explained(sides, predicted, error + 8 * sides.roundoff * norm(sides.wrong)), None)


def _explained(
    sides: Contrast, predicted: Mapping[str, np.ndarray], error: float
) -> Iterator[tuple[str, float, float]]:
    for name, value in predicted.items():
        if value.shape == sides.wrong.shape and accepted(residual := sides.residual(value), sides.difference, error):
            yield name, residual, error
