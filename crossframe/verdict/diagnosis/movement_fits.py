"""The right numbers in the wrong place: transposed, shifted, of another step, of another parameter."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from crossframe.verdict.diagnosis.fit import Contrast, accepted, is_uninformative
from crossframe.verdict.measure.metrics import distance, norm

MOST_SHIFT = 64


@dataclass(frozen=True)
class Found:
    """Where the wrong side's numbers come from, in words, and what that leaves unexplained."""

    said: str
    rest: float


@dataclass(frozen=True)
class Shift:
    """wrong[i] = right[i - by], in all but the elements that come in from outside."""

    by: int
    rest: float
    overlap: int


def transposition_of(sides: Contrast) -> Found | None:
    """The order of axes in which the wrong side holds the right side's elements; None if in no other order.

    Tried are all orders of up to four axes, read into the shape that it has, and each axis split in two (the heads of attention,
    say, and the width of each) with its parts exchanged.
    """
    x, y = sides.right, sides.wrong
    if x.ndim == 0 or x.ndim > 4 or abs(norm(x) - norm(y)) > sides.limit + 1e-12 * norm(y):
        return None
    return _first(sides, ((said, moved.reshape(x.shape)) for said, moved in reorderings(x)))


def reorderings(x: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Every other order of its elements that a mistake about axes gives, and how to say it. Shapes may differ from x's."""
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
    for said, predicted in candidates:
        if accepted(rest := sides.rest(predicted), difference, sides.limit):
            return Found(said, rest)
    return None


def shift_of(
    sides: Contrast, start: int | None = None, stop: int | None = None, also: Sequence[int] = ()
) -> Shift | None:
    """By how many elements the wrong side is moved along the line; at most `MOST_SHIFT`, and at most half of what there is.

    Args:
        start, stop: the elements that are moved; those that come in may lie outside.
        also: further distances to try.

    >>> x = np.arange(1.0, 9.0)
    >>> shift_of(Contrast(x, np.concatenate([[42.0], x[:-1]]), 0.0))
    Shift(by=1, rest=0.0, overlap=7)
    """
    x, y = sides.right.reshape(-1), sides.wrong.reshape(-1)
    first, last = start or 0, y.size if stop is None else stop
    for by in sorted({*range(1, MOST_SHIFT + 1), *also}):
        for shift in (by, -by):
            # What comes from outside of the parameter is not known.
            low, high = max(first, shift), min(last, y.size + min(shift, 0))
            if 2 * (high - low) < last - first or high - low < 2:
                continue
            target, source = y[low:high], x[low - shift : high - shift]
            if is_uninformative(source, 2 * sides.limit):
                continue
            rest = distance(target, source)
            if accepted(rest, distance(target, x[low:high]), sides.limit):
                return Shift(shift, rest, high - low)
    return None


def same_as(sides: Contrast, candidates: Mapping[str, np.ndarray]) -> Found | None:
    """The first of these arrays that the wrong side is; they are read into its shape. Those of one value tell nothing."""
    shaped = (
        (name, np.asarray(array, np.float64).reshape(sides.wrong.shape))
        for name, array in candidates.items()
        if array.size == sides.wrong.size and not is_uninformative(array, 2 * sides.limit)
    )
    return _first(sides, shaped)
