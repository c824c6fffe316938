"""How far two quantities are apart. All arithmetic is float64, whatever the recordings hold."""

import math

import numpy as np


def norm(array: np.ndarray) -> float:
    """The 2-norm over all elements, scaled so that neither large nor small elements are lost in the squares.

    >>> norm(np.array([0.0, 3e-200]))
    3e-200
    """
    array = np.asarray(array, np.float64)
    largest = float(np.max(np.abs(array), initial=0.0))
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    return largest * float(np.sqrt(np.sum(np.square(array / largest))))


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """norm(a - b)."""
    with np.errstate(over="ignore"):
        return norm(np.asarray(a, np.float64) - np.asarray(b, np.float64))


def trimmed_distance(a: np.ndarray, b: np.ndarray) -> float:
    """The same without the ceil(sqrt(numel)) elements that are furthest apart, which a few that are off may be.

    >>> trimmed_distance(np.zeros(4), np.array([3.0, 0.0, 9.0, 4.0]))
    3.0
    """
    return _nearest(a, b, np.size(a) - math.ceil(math.sqrt(np.size(a))))


def inner_distance(a: np.ndarray, b: np.ndarray) -> float:
    """The same of the half of the elements that are least apart: what nearly all elements do, whatever the others do.

    >>> inner_distance(np.zeros(4), np.array([3.0, 0.0, 9.0, 4.0]))
    3.0
    """
    return _nearest(a, b, np.size(a) // 2)


def _nearest(a: np.ndarray, b: np.ndarray, count: int) -> float:
    apart = np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).reshape(-1)
    return norm(np.partition(apart, count - 1)[:count]) if count else 0.0


def ratio(difference: float, scale: float) -> float:
    """difference / scale; 0 for no difference, and inf for a difference where there is nothing to measure it by."""
    if difference == 0.0:
        return 0.0
    return difference / scale if scale > 0.0 else math.inf


def parameter_scale(size: float, numel: int, total_update_norm: float, learning_rate: float, steps: int) -> float:
    """What a difference of a parameter is measured by: max(norm(a), norm(total update), lr * steps * sqrt(numel)).

    A parameter that starts at zero, such as a bias, has a tiny norm at first; what training moves it by is then the honest
    measure. lr * steps * sqrt(numel) is how far Adam, which moves each element by up to lr a step, can have moved it.

    Args:
        size: norm(a).
        total_update_norm: norm(final - initial) of the first recording.
        steps: steps of the run.
    """
    return max(size, total_update_norm, learning_rate * steps * math.sqrt(numel))


def gradient_scale(size: float, noise_scale: float) -> float:
    """What a gradient's difference is measured by: its norm, or where that is less, what rounding may leave of a sum that is zero
    (`crossframe.verdict.measure.bounds.Bounds.noise_scale`)."""
    return max(size, noise_scale)


def root_mean_square(norms: float, numel: int) -> float:
    """norm / sqrt(numel): the size of a typical element; 0 of nothing."""
    return norms / math.sqrt(numel) if numel else 0.0
