"""Fits moved values: transposed, shifted, of another step, of another parameter."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from crossframe.verdict.diagnosis.fit import Contrast, accepted, first_accepted, is_uninformative
from crossframe.verdict.measure.metrics import distance, norm

MOST_SHIFT = 64
MOST_STARTS = 64
"""The largest number of elements of a parameter that may be the first one that was read: more do not tell positions apart."""


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
    if x.ndim > 4 or abs(norm(x) - norm(y)) > sides.limit + 1e-12 * norm(y):
        return None
    found = first_accepted(sides, ((text, moved.reshape(x.shape)) for text, moved in reorderings(x)), sides.limit)
    return found and Found(*found)


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
    found = first_accepted(sides, shaped, sides.limit)
    return found and Found(*found)


@dataclass(frozen=True)
class Read:
    """Values that were read at another position of a flat tensor, in which parameters and padding follow one another.

    Attributes:
        first, start: the parameter in which this position is, and the element of it.
        names: all parameters whose values were read.
    """

    first: str
    start: int
    names: tuple[str, ...]
    residual: float


def read_elsewhere(sides: Contrast, others: Mapping[str, np.ndarray]) -> Read | None:
    """Find the wrong side's flattened elements among the right values of other parameters.

    They begin within one of these and go on, after any number of zeros, with the first elements of others.

    >>> x = {"a": np.arange(1.0, 6.0), "b": np.arange(11.0, 15.0)}
    >>> read_elsewhere(Contrast(np.arange(4.0), np.array([4.0, 5.0, 0.0, 11.0]), 0.0), x)
    Read(first='a', start=3, names=('a', 'b'), residual=0.0)
    """
    y = sides.wrong.reshape(-1)
    flat = {name: np.asarray(value, np.float64).reshape(-1) for name, value in others.items()}
    filled = np.flatnonzero(np.abs(y) > sides.limit)
    if len(filled) < 2 or is_uninformative(y, 2 * sides.limit):
        return None
    for name, value in flat.items():
        starts = np.flatnonzero(np.abs(value[1:] - y[filled[0]]) <= sides.limit) + 1
        for start in starts if len(starts) <= MOST_STARTS else ():
            found = _followed(y, int(filled[0]), name, int(start), flat, sides.limit)
            if found is not None and accepted(residual := distance(y, found[0]), sides.difference, sides.limit):
                return Read(name, int(start), found[1], residual)
    return None


def _followed(
    y: np.ndarray, at: int, name: str, start: int, flat: Mapping[str, np.ndarray], limit: float
) -> tuple[np.ndarray, tuple[str, ...]] | None:
    """(prediction of y, names) if its elements from `at` on are those of a parameter from `start` on, and then of others."""
    predicted, names, value = np.zeros_like(y), [name], flat[name][start:]
    while True:
        num = min(len(value), len(y) - at)
        if (num < 2 and len(names) == 1) or distance(y[at : at + num], value[:num]) > limit:
            return None
        predicted[at : at + num] = value[:num]
        left = np.flatnonzero(np.abs(y[at + num :]) > limit)
        if not left.size:
            return predicted, tuple(names)
        at += num + int(left[0])
        following = [
            each
            for each, other in flat.items()
            if each not in names and distance(other[: len(y) - at], y[at : at + len(other)]) <= limit
        ]
        if not following:
            return None
        names.append(following[0])
        value = flat[following[0]]
