"""Finds the rearrangement between two parameters of which samples are known, and the parts of joined or stacked ones.

A rearrangement is accepted if the signatures say that both have the same elements, if it takes all elements of the samples to
their places, and if no other one that is tried does. Tried are all that transpose, join or split dims, and those that also give
the rows of one dim another order of heads or of their halves.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from crossframe.alignment.portions import Rows, cut_text, indexed_text
from crossframe.alignment.solve import rearrangements
from crossframe.alignment.summary import Summary
from crossframe.rearrange import Rearrangement
from crossframe.recording.sample import Sample

LEAST_PLACES = 16
"""The number of elements whose places must agree. Two different rearrangements agree at one place in two or fewer."""
_PROBES = 257
"""The number of places at which two rearrangements are compared, to see whether they are the same."""


def order_of(first: Summary, second: Summary) -> Rearrangement | None:
    """The rearrangement of the second parameter to the first one, which have the same elements; None if none or several fit.

    >>> x = np.random.default_rng(0).normal(size=(3, 8, 4))
    >>> order_of(Summary.of(x.transpose(1, 2, 0).reshape(32, 3)), Summary.of(x)).text
    'a b c=4 -> (b c) a'
    """
    if first.shape == second.shape and first.sketch.equals(second.sketch):
        return Rearrangement.transposing(tuple(range(len(first.shape))))
    assert first.sample is not None and second.sample is not None
    return order_of_samples(first.shape, first.sample, second.shape, second.sample)


def order_of_samples(
    shape: tuple[int, ...], sample: Sample, other_shape: tuple[int, ...], other: Sample
) -> Rearrangement | None:
    """The rearrangement from the other shape under which both samples are the same."""
    limit = min(sample.limit, other.limit)
    ours, theirs = sample.within(limit), other.within(limit)
    if len(ours.places) != len(theirs.places) or len(ours.places) < min(LEAST_PLACES, math.prod(shape)):
        return None
    found: list[Rearrangement] = []
    for plain in rearrangements(shape, other_shape):
        moved = plain.places(other_shape, theirs.places)
        if _are_same(ours, moved, theirs.values):
            found.append(plain)
        elif plain.axes is not None:
            found += _of_rows(plain, shape, ours, moved, theirs.values)
    probes = np.unique(np.linspace(0, math.prod(shape) - 1, _PROBES).astype(np.int64))
    different = {form.places(other_shape, probes).tobytes(): form for form in reversed(found)}
    return found[0] if len(different) == 1 else None


def _are_same(ours: Sample, places: np.ndarray, values: np.ndarray) -> bool:
    """Whether these elements are those of a sample, in any order."""
    order = np.argsort(places)
    return np.array_equal(places[order], ours.places) and np.array_equal(values[order], ours.values)


def _of_rows(
    plain: Rearrangement, shape: tuple[int, ...], ours: Sample, places: np.ndarray, values: np.ndarray
) -> Iterator[Rearrangement]:
    """The rearrangements that transpose as `plain` does, and give the rows of one dim another order."""
    at = np.unravel_index(places, shape)
    for dim, size in enumerate(shape):
        stride = math.prod(shape[dim + 1 :])
        for sizes in _factors(size):
            digits = np.unravel_index(at[dim], sizes)
            for order in _ORDERS[len(sizes)]:
                row = np.ravel_multi_index([digits[i] for i in order], [sizes[i] for i in order])
                if _are_same(ours, places + (row - at[dim]) * stride, values):
                    yield _with_rows(plain, dim, sizes, order)


_ORDERS = {2: ((1, 0),), 3: ((0, 2, 1), (1, 0, 2), (2, 1, 0))}
"""The orders of loops that no fewer loops state."""


def _factors(size: int) -> Iterator[tuple[int, ...]]:
    """The ways to write a size as a product of two or three numbers above 1."""
    divisors = [each for each in range(2, size) if size % each == 0]
    for outer in divisors:
        yield outer, size // outer
        for middle in divisors:
            if size // outer % middle == 0 and outer * middle < size:
                yield outer, middle, size // outer // middle


def _with_rows(plain: Rearrangement, dim: int, sizes: tuple[int, ...], order: Iterable[int]) -> Rearrangement:
    (axis,) = plain.right[dim]
    loops = [f"{axis}{i}" for i in range(len(sizes))]
    left = [
        f"({' '.join(f'{loop}={size}' if i else loop for i, (loop, size) in enumerate(zip(loops, sizes, strict=True)))})"
        if name == axis
        else name
        for (name,) in plain.left
    ]
    right = [f"({' '.join(loops[i] for i in order)})" if name == axis else name for (name,) in plain.right]
    return Rearrangement(f"{' '.join(left)} -> {' '.join(right)}")


@dataclass(frozen=True)
class _Part:
    """A parameter in a larger array.

    Attributes:
        own, places: the places of the same elements in the parameter, and in the array.
        values: of these elements.
    """

    name: str
    own: np.ndarray
    places: np.ndarray
    values: np.ndarray


def parts_of(whole: Summary, parts: Mapping[str, Summary]) -> dict[str, str] | None:
    """The patterns of the parameters that an array consists of; None if it consists of none of these.

    Args:
        parts: by name.

    >>> a, b = np.random.default_rng(0).normal(size=(2, 30, 4))
    >>> parts_of(Summary.of(np.concatenate([a, b]).T), {"a": Summary.of(a), "b": Summary.of(b)})
    {'a': 'a b[0:30/60] -> b a', 'b': 'a b[30:60/60] -> b a'}
    """
    names = members(whole, parts)
    if not names:
        return None
    found = [_located(whole, name, parts[name]) for name in names]
    if any(part is None for part in found):
        return None
    located = [part for part in found if part is not None]
    for dim in range(whole.ndim):
        if (patterns := _joined(whole, located, parts, dim)) is not None:
            return patterns
    return None


def members(whole: Summary, parts: Mapping[str, Summary]) -> list[str]:
    """The parameters whose elements together are those of an array: the signatures add up. [] if there are none."""
    assert whole.sample is not None
    values = set(whole.sample.values.tolist())
    found = []
    for name, part in parts.items():
        assert part.sample is not None
        own = part.sample.within(whole.sample.limit).values.tolist()
        if own and part.size < whole.size and part.sketch.dtype == whole.sketch.dtype and values.issuperset(own):
            found.append(name)
    is_whole = sum(parts[name].size for name in found) == whole.size
    adds_up = sum(parts[name].signature for name in found) % 2**64 == whole.signature
    return found if len(found) > 1 and is_whole and adds_up else []


def _located(whole: Summary, name: str, part: Summary) -> _Part | None:
    """The elements of a part whose places in the array are known; None if they are too few, or have equal values."""
    assert whole.sample is not None and part.sample is not None
    own = part.sample.within(whole.sample.limit)
    common = whole.sample.within(own.limit)
    unique, index, counts = np.unique(common.values, return_index=True, return_counts=True)
    once = dict(zip(unique[counts == 1].tolist(), common.places[index[counts == 1]].tolist(), strict=True))
    values, own_counts = np.unique(own.values, return_counts=True)
    alone = set(values[own_counts == 1].tolist())
    kept = [i for i, value in enumerate(own.values.tolist()) if value in once and value in alone]
    if len(kept) < LEAST_PLACES:
        return None
    taken = own.values[kept]
    return _Part(name, own.places[kept], np.array([once[value] for value in taken.tolist()]), taken)


def _joined(whole: Summary, located: list[_Part], parts: Mapping[str, Summary], dim: int) -> dict[str, str] | None:
    """The patterns of parts that follow each other along a dim of the array, as rows or as slices."""
    rows = [np.unravel_index(part.places, whole.shape)[dim] for part in located]
    found, start = {}, 0
    for i in sorted(range(len(located)), key=lambda i: int(rows[i].min())):
        part = located[i]
        count, rest = divmod(parts[part.name].size * whole.shape[dim], whole.size)
        if rest or rows[i].min() < start or rows[i].max() >= start + count:
            return None
        shape = (*whole.shape[:dim], count, *whole.shape[dim + 1 :])
        at = list(np.unravel_index(part.places, whole.shape))
        at[dim] = at[dim] - start
        is_slice, others = count == 1, (*whole.shape[:dim], *whole.shape[dim + 1 :])
        places = np.ravel_multi_index(at, shape)
        form = _order_within(part, parts[part.name].shape, places, others if is_slice else shape)
        if form is None:
            return None
        text = (
            indexed_text(form.text, len(others), [(dim, start, whole.shape[dim])])
            if is_slice
            else cut_text(form, shape, Rows(dim, 1, start, count, whole.shape[dim]))
        )
        if text is None:
            return None
        found[part.name], start = text, start + count
    return found


def _order_within(
    part: _Part, shape: tuple[int, ...], places: np.ndarray, inner: tuple[int, ...]
) -> Rearrangement | None:
    order = np.argsort(places)
    ours = Sample(0, part.own, part.values, math.inf, 0.0)
    theirs = replace(ours, places=places[order], values=part.values[order])
    return order_of_samples(shape, ours, inner, theirs)
