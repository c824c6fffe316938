"""Fits moved values: transposed, shifted, of another step, of another parameter."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from crossframe.verdict.diagnosis.fit import Contrast, accepted, is_uninformative
from crossframe.verdict.measure.metrics import distance, norm

MOST_SHIFT = 64


@dataclass(frozen=True)
class Found:
    """A description of the source of the wrong side's values, and its residual."""

    text: str
    residual: float


@dataclass(frozen=True)
class Shift:
    """wrong[i] = right[i - by] for the `overlap` elements whose source is in range."""

    by: int
    residual: float
    overlap: int


def transposition_of(sides: Contrast) -> Found | None:
    """The permutation of axes that explains the wrong side; None if there is none.

    All permutations of up to four axes are tried, reshaped to the same shape, and each axis split in two (for example heads and
    head width) with its parts exchanged.
    """
    x, y = sides.right, sides.wrong
    if x.ndim == 0 or x.ndim > 4 or abs(norm(x) - norm(y)) > sides.limit + 1e-12 * norm(y):
        return None
    return _first(sides, ((text, moved.reshape(x.shape)) for text, moved in reorderings(x)))


def reorderings(x: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (description, x with permuted elements) for each mistake about axes. Shapes may differ from that of x."""
    for order in permutations(range(x.ndim)):
        if order != tuple(range(x.ndim)):
            yield (
                f"axes in the order {order} instead of {tuple(range(x.ndim))}" if x.ndim > 2 else "transposed",
                (x.transpose(order)),
            )
    for dim, size in enumerate(x.shape):
        for parts in range(2, size // 2 + 1):
            if size % parts == 0:
                split = x.reshape(*x.shape[:dim], parts, size // parts, *x.shape[dim + 1 :])
                swapped = np.swapaxes(split, dim, dim + 1)
                yield f"dim {dim} read as {size // parts} x {parts} instead of {parts} x {size // parts}", swapped


def _first(sides: Contrast, candidates: Iterator[tuple[str, np.ndarray]]) -> Found | None:
    difference = sides.difference
    for text, predicted in candidates:
        if accepted(residual := sides.residual(predicted), difference, sides.limit):
            return Found(text, residual)
    return None


def shift_of(
    sides: Contrast, start: int | None = None, stop: int | None = None, also: Sequence[int] = ()
) -> Shift | None:
    """The shift of the wrong side's flattened elements: at most `MOST_SHIFT` or one of `also`, and at most half of the range.

    Args:
        start, stop: the range of shifted elements; their sources may be outside.
        also: further shifts to try.

    >>> x = np.arange(1.0, 9.0)
    >>> shift_of(Contrast(x, np.concatenate([[42.0], x[:-1]]), 0.0))
    Shift(by=1, residual=0.0, overlap=7)
    """
    x, y = sides.right.reshape(-1), sides.wrong.reshape(-1)
    first, last = start or 0, y.size if stop is None else stop
    for by in sorted({*range(1, MOST_SHIFT + 1), *also}):
        for shift in (by, -by):
            # Values from outside the parameter are unknown.
            low, high = max(first, shift), min(last, y.size + min(shift, 0))
            if 2 * (high - low) < last - first or high - low < 2:
                continue
            target, source = y[low:high], x[low - shift : high - shift]
            if is_uninformative(source, 2 * sides.limit):
                continue
            residual = distance(target, source)
            if accepted(residual, distance(target, x[low:high]), sides.limit):
                return Shift(shift, residual, high - low)
    return None


def same_as(sides: Contrast, candidates: Mapping[str, np.ndarray]) -> Found | None:
    """The first candidate, reshaped, that equals the wrong side; constant candidates are skipped."""
    shaped = (
        (name, np.asarray(array, np.float64).reshape(sides.wrong.shape))
        for name, array in candidates.items()
        if array.size == sides.wrong.size and not is_uninformative(array, 2 * sides.limit)
    )
    return _first(sides, shaped)
