"""Fits the weight of a module: with permuted dims, that of another module or step, or a convolution that pads differently."""

import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from crossframe.verdict.diagnosis.fit import Contrast, Key, accepted, first_accepted, sum_roundoff
from crossframe.verdict.measure.metrics import distance, norm

Affine = tuple[np.ndarray, np.ndarray | None]
"""Weight and bias of a module."""


def kernel_reordered(
    sides: Contrast, inputs: tuple[np.ndarray, np.ndarray], weight: np.ndarray, bias: np.ndarray | None, roundoff: float
) -> tuple[str, float] | None:
    """(description, residual) of a weight with permuted dims on the wrong side, if the right side uses the weight unchanged.

    A sum of n products has an error of at most n u times the sum of their magnitudes (Higham, section 4.2).
    """
    others = ((text, (other, bias)) for text, other in _kernels(weight))
    found = _kernel_of(sides, inputs, (weight, bias), others, (weight[0].size + 2) * roundoff, sides.limit)
    return found and found[:2]


def _kernels(weight: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    if weight.ndim == 2:
        yield "transposed", weight.T
    elif weight.ndim == 4:
        yield "with height and width exchanged", weight.transpose(0, 1, 3, 2)
        yield "with input and output channels exchanged", weight.transpose(1, 0, 2, 3)
        yield "with channels and spatial dims exchanged", weight.transpose(1, 0, 3, 2)


def other_kernel(
    sides: Contrast,
    inputs: tuple[np.ndarray, np.ndarray],
    own: Affine,
    others: Mapping[Key, Affine],
    roundoff: float,
) -> tuple[Key, float, float] | None:
    """(key, residual, error) of the other module or step whose weight the wrong side uses; the right side uses its own.

    Args:
        own: weight of shape (out, in) and bias of this module.
        others: the same of other modules by name, or of earlier steps.
    """
    return _kernel_of(sides, inputs, own, others.items(), sum_roundoff(own[0][0].size, roundoff), 0.0)


def _kernel_of(
    sides: Contrast,
    inputs: tuple[np.ndarray, np.ndarray],
    own: Affine,
    others: Iterable[tuple[Key, Affine]],
    roundoff: float,
    limit: float,
) -> tuple[Key, float, float] | None:
    """(key, residual, error) of the first of other weights that explains the wrong side; only the right side uses its own.

    Args:
        roundoff: of the sum of products, relative to the sum of their magnitudes.
        limit: a further bound on the error.
    """
    right, (weight, bias) = _output(inputs[0], *own), own
    if right.shape != sides.right.shape:
        return None
    magnitude = _output(np.abs(inputs[1]), np.abs(weight), None if bias is None else np.abs(bias))
    error = limit + roundoff * norm(magnitude)
    if distance(sides.right, right) > error or first_accepted(sides, [("own", _output(inputs[1], *own))], error):
        return None
    found = first_accepted(sides, ((key, _output(inputs[1], *other)) for key, other in others), error)
    return found and (*found, error)


def _output(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """The output of a linear map or of a convolution; without elements if the input has another shape."""
    if weight.ndim == 2:
        return x @ weight.T + (0.0 if bias is None else bias) if x.shape[-1:] == weight.shape[1:] else np.zeros(0)
    found = convolved(x, weight)
    return np.zeros(0) if found is None else found + (0.0 if bias is None else bias[:, None, None])


def other_scale(sides: Contrast, own: Affine, others: Mapping[Key, Affine]) -> tuple[Key, float, float] | None:
    """`other_kernel` for a norm, whose weight multiplies the last dim, from the right side's output for an equal input."""
    weight, bias = own
    if sides.right.shape[-1:] != weight.shape or not weight.all():
        return None
    normed = (sides.right - (0.0 if bias is None else bias)) / weight
    largest = max((float(np.abs(theirs / weight).max()) for theirs, _ in others.values()), default=0.0)
    error = sides.limit * (1 + largest) + 8 * sides.roundoff * norm(sides.wrong)
    predicted = ((key, normed * theirs + (0.0 if shift is None else shift)) for key, (theirs, shift) in others.items())
    found = first_accepted(sides, predicted, error)
    return found and (*found, error)


_STRIDES = (1, 2, 3, 4)


def paddings_of(
    sides: Contrast, inputs: tuple[np.ndarray, np.ndarray], weight: np.ndarray, bias: np.ndarray | None, roundoff: float
) -> tuple[int, tuple[int, int], float] | None:
    """(stride, zeros before each spatial dim on both sides, residual) of a convolution whose sides pad their input differently.

    The tolerance is that of `kernel_reordered`.
    """
    if not sides.right.ndim == weight.ndim == 4 or not all(
        x.ndim == 4 and x.shape[1] == weight.shape[1] for x in inputs
    ):
        return None
    size = max(weight.shape[2:])
    added = 0.0 if bias is None else bias[:, None, None]
    maps = [_correlated(x, weight, (size - 1,) * 2) + added for x in inputs]
    magnitude = _correlated(np.abs(inputs[0]), np.abs(weight), (size - 1,) * 2) + np.abs(added)

    def padding_of(side: np.ndarray, whole: np.ndarray, stride: int) -> tuple[float, int] | None:
        """(residual, zeros before each dim) of one side."""
        fits = []
        for padding in range(size):
            places = slice(size - 1 - padding, None, stride)
            values, terms = (
                each[:, :, places, places][:, :, : side.shape[2], : side.shape[3]] for each in (whole, magnitude)
            )
            if values.shape == side.shape:
                tolerance = sides.limit + (weight[0].size + 2) * roundoff * norm(terms)
                fits.append((distance(side, values), padding, tolerance))
        residual, padding, tolerance = min(fits, default=(math.inf, 0, 0.0))
        return (residual, padding) if accepted(residual, sides.difference, tolerance) else None

    for stride in _STRIDES:
        right, wrong = map(padding_of, (sides.right, sides.wrong), maps, (stride, stride))
        if right is not None and wrong is not None and right[1] != wrong[1]:
            return stride, (right[1], wrong[1]), wrong[0]
    return None


def _correlated(x: np.ndarray, weight: np.ndarray, zeros: tuple[int, ...]) -> np.ndarray:
    """The convolution with stride 1 of an input with so many zeros on both sides of height and width."""
    padded = np.pad(x, ((0, 0), (0, 0), *((count, count) for count in zeros)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, weight.shape[2:], axis=(2, 3))
    return np.einsum("bihwyx,oiyx->bohw", windows, weight, optimize=True)


def convolved(x: np.ndarray, weight: np.ndarray) -> np.ndarray | None:
    """A convolution with stride 1 and same padding: (batch, channels, height, width) with a weight of shape (out channels, in
    channels, height, width), odd height and width; None for other shapes.

    >>> x = np.arange(4.0).reshape(1, 1, 2, 2)
    >>> convolved(x, np.ones((1, 1, 3, 3)))[0, 0].tolist()
    [[6.0, 6.0], [6.0, 6.0]]
    """
    if (
        not x.ndim == weight.ndim == 4
        or x.shape[1] != weight.shape[1]
        or not all(size % 2 for size in weight.shape[2:])
    ):
        return None
    return _correlated(x, weight, tuple(size // 2 for size in weight.shape[2:]))
