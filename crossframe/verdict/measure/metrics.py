"""Norms, distances and scales. All arithmetic is float64, whatever the dtype of the recordings."""

import math
from collections.abc import Sequence

import numpy as np

FEW_ROUNDINGS = 4
"""[Note: a few roundings] Two formulas of one value differ at least in the last rounding of each result, and mostly in that of an
operand of each: by 4 u of the norm, or of the scale of the quantity. Long sums differ by little more in norm, since their errors
vary in sign over the elements. A wrong constant makes a difference of its own size. Where that is below 4 u, as of a weight decay
of 1e-2 at a learning rate of 1e-5 in float32, it is found if a hypothesis explains it."""


def norm(array: np.ndarray) -> float:
    """The 2-norm over all elements, scaled so that squares neither overflow nor underflow.

    >>> norm(np.array([0.0, 3e-200]))
    3e-200
    """
    array = np.asarray(array, np.float64)
    largest = float(np.abs(array).max(initial=0.0))
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    return largest * math.sqrt(np.square(array / largest).sum())


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """norm(a - b)."""
    with np.errstate(over="ignore"):
        return norm(np.asarray(a, np.float64) - np.asarray(b, np.float64))


def trimmed_distance(a: np.ndarray, b: np.ndarray) -> float:
    """norm(a - b) without the ceil(sqrt(numel)) elements that differ most.

    >>> trimmed_distance(np.zeros(4), np.array([3.0, 0.0, 9.0, 4.0]))
    3.0
    """
    return _nearest(a, b, np.size(a) - math.ceil(math.sqrt(np.size(a))))


def inner_distance(a: np.ndarray, b: np.ndarray) -> float:
    """norm(a - b) over the half of the elements that differ least.

    >>> inner_distance(np.zeros(4), np.array([3.0, 0.0, 9.0, 4.0]))
    3.0
    """
    return _nearest(a, b, np.size(a) // 2)


def _nearest(a: np.ndarray, b: np.ndarray, count: int) -> float:
    apart = np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).reshape(-1)
    return norm(np.partition(apart, count - 1)[:count]) if count else 0.0


def ratio(difference: float, scale: float) -> float:
    """difference / scale; 0 without a difference, and inf for a difference with a scale of 0."""
    if difference == 0.0:
        return 0.0
    return difference / scale if scale > 0.0 else math.inf


def parameter_scale(size: float, numel: int, total_update_norm: float, learning_rate: float, steps: int) -> float:
    """The scale of a parameter's difference: max(norm(a), norm(total update), lr * steps * sqrt(numel)).

    A parameter that starts at zero, such as a bias, has a small norm at first, so its total update is the better scale.
    lr * steps * sqrt(numel) bounds the total update of Adam, which moves each element by up to lr per step.

    Args:
        size: norm(a).
        total_update_norm: norm(final - initial) of the first recording.
        steps: steps of the run.
    """
    return max(size, total_update_norm, learning_rate * steps * math.sqrt(numel))


def gradient_scale(size: float, noise_scale: float) -> float:
    """The scale of a gradient's difference: its norm, but at least the noise scale
    (`crossframe.verdict.measure.bounds_by_dtype.Bounds.noise_scale`)."""
    return max(size, noise_scale)


def root_mean_square(norms: float, numel: int) -> float:
    """norm / sqrt(numel); 0 without elements."""
    return norms / math.sqrt(numel) if numel else 0.0


def weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """The value at which half of the weight is reached, in increasing order.

    >>> weighted_median([3.0, 1.0, 2.0], [1.0, 1.0, 4.0])
    2.0
    """
    order = np.argsort(values)
    half = np.searchsorted(np.cumsum(np.asarray(weights)[order]), sum(weights) / 2)
    return float(values[order[half]])
