"""Finds the rearrangement between two arrays with the same elements, from the signatures of their slices."""

import itertools
import math
import string
from collections.abc import Iterator, Sequence

import numpy as np

from crossframe.alignment.slices import axis_sets, axis_signatures
from crossframe.rearrange import Rearrangement, order_text
from crossframe.recording.hashing import element_hashes

Digit = tuple[int, int]
"""(size, stride) of one of the loops that an index consists of; the outermost comes first."""
_MOST_DIGITS = 4
_MOST_BLOCKS = 8


def solve(canonical: np.ndarray, array: np.ndarray) -> Rearrangement | None:
    """The rearrangement of `array` to `canonical`; None if there is none, or none of a few loops per dim.

    Args:
        canonical, array: of one dtype, with equally many elements.

    >>> x = np.random.default_rng(0).normal(size=(3, 2, 4))
    >>> solve(x.transpose(1, 2, 0).reshape(8, 3), x).text
    'a b c=4 -> (b c) a'
    """
    if same_bits(canonical, array):
        return Rearrangement.transposing(tuple(range(array.ndim)))
    if not array.size:
        return None  # no element tells where another dim comes from
    first, second = element_hashes(canonical), element_hashes(array)
    found = _joining(first, second)
    if found is None and (back := _joining(second, first)) is not None:
        found = back.inverse
    return found if found is not None and same_bits(canonical, found(array)) else None


def solve_blocks(canonical: np.ndarray, array: np.ndarray) -> Rearrangement | None:
    """The rearrangement that transposes `array` and gives equal blocks of one dim another order, such as the gates of a recurrent
    layer; None if there is none, or several.

    Blocks have two rows or more, so that a few rows in any order are none.

    >>> x = np.random.default_rng(0).normal(size=(3, 6))
    >>> solve_blocks(x.T[[2, 3, 0, 1, 4, 5]], x).text
    'a (b0{1,0,2} b1) -> (b0 b1) a'
    """
    ours, theirs = element_hashes(canonical), element_hashes(array)
    found = []
    for form in rearrangements(ours.shape, theirs.shape):
        if all(len(dim) < 2 for dim in (*form.left, *form.right)):
            moved = form(theirs)
            orders = ((dim, _block_order(ours, moved, dim)) for dim in range(ours.ndim))
            found += [_with_blocks(form, dim, order) for dim, order in orders if order is not None]
    return found[0] if len(found) == 1 else None


def _block_order(ours: np.ndarray, theirs: np.ndarray, dim: int) -> tuple[int, ...] | None:
    """Which block of the other array each block of a dim is, for the smallest number of blocks; None if they are none."""
    rows = [axis_signatures(hashes, (dim,)) for hashes in (ours, theirs)]
    for count in range(2, min(_MOST_BLOCKS, len(rows[0]) // 2) + 1):
        if len(rows[0]) % count:
            continue
        blocks, others = (each.reshape(count, -1).sum(axis=1).tolist() for each in rows)
        if len(set(blocks)) < count or set(blocks) != set(others):
            continue
        order = tuple(map(others.index, blocks))
        apart = theirs.reshape(*theirs.shape[:dim], count, -1, *theirs.shape[dim + 1 :])
        if np.array_equal(apart.take(order, axis=dim).reshape(ours.shape), ours):
            return order
    return None


def _with_blocks(form: Rearrangement, dim: int, order: tuple[int, ...]) -> Rearrangement:
    """A transposition that also gives the blocks of a dim after it another order."""
    (axis,) = form.right[dim]
    before, _, after = form.text.partition("->")
    before = before.replace(axis, f"({axis}0{order_text(order)} {axis}1)")
    return Rearrangement(f"{before}->{after.replace(axis, f'({axis}0 {axis}1)')}")


def rearrangements(first: tuple[int, ...], second: tuple[int, ...]) -> Iterator[Rearrangement]:
    """Every rearrangement from the second shape to the first one that only transposes, joins or splits dims; of equal shapes that
    which changes nothing first.

    >>> [each.text for each in rearrangements((4, 4), (4, 4))]
    ['a b -> a b', 'a b -> b a']

    Shapes without elements have none but the one that changes nothing.
    """
    if 0 in (*first, *second):
        if first == second:
            yield Rearrangement.transposing(tuple(range(len(first))))
        return
    for one, other, inverted in ((first, second, False), (second, first, True)):
        dims = [dim for dim, size in enumerate(one) if size > 1]
        for sets in _assignments([one[dim] for dim in dims], other, ()):
            if inverted and all(len(axes) == 1 for axes in sets):
                continue  # a transposition, which was among those before
            for orders in itertools.product(*map(itertools.permutations, sets)):
                loops = []
                for dim, axes in zip(dims, orders, strict=True):
                    strides = [math.prod(other[axis] for axis in axes[i + 1 :]) for i in range(len(axes))]
                    loops += [(dim, axis, other[axis], stride) for axis, stride in zip(axes, strides, strict=True)]
                found = _pattern(sorted(loops, key=lambda loop: loop[1]), one, other)
                yield found.inverse if inverted else found


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether all elements are equal in their bits, up to the sign of zeros."""
    return a.shape == b.shape and np.array_equal(element_hashes(a), element_hashes(b))


def row_order(rows: np.ndarray, slices: np.ndarray) -> np.ndarray | None:
    """For each slice the index of the row with the same signature; None if one has none. Equal rows are taken in order."""
    by_row, by_slice = np.argsort(rows, kind="stable"), np.argsort(slices, kind="stable")
    wanted = slices[by_slice]
    # The k-th of several equal slices is the k-th of the rows that equal it.
    starts = np.searchsorted(wanted, wanted)
    at = np.searchsorted(rows[by_row], wanted) + np.arange(len(wanted)) - starts
    if (at >= len(rows)).any() or (rows[by_row][at] != wanted).any():
        return None
    order = np.empty(len(slices), np.int64)
    order[by_slice] = by_row[at]
    return order


def digits_of(index: np.ndarray) -> list[Digit] | None:
    """The loops whose sum gives `index[i]` for each i, `index[0]` being 0; None if there are more than a few.

    >>> digits_of(np.array([0, 2, 4, 1, 3, 5]))
    [(2, 1), (3, 2)]
    """
    found: list[Digit] = []
    while len(index) > 1:
        if len(found) == _MOST_DIGITS:
            return None
        stride, count = int(index[1] - index[0]), len(index)
        run = next((i for i in range(2, count) if index[i] != i * stride), count)
        size = next(size for size in range(run, 0, -1) if count % size == 0)
        if size == 1 or not np.array_equal(index.reshape(-1, size), index[::size, None] + stride * np.arange(size)):
            return None
        found.insert(0, (size, stride))
        index = index[::size]
    return found


def _joining(first: np.ndarray, second: np.ndarray) -> Rearrangement | None:
    """The rearrangement from the second array if each of its dims lies within one dim of the first one."""
    dims = [dim for dim, size in enumerate(first.shape) if size > 1]
    rows = {dim: axis_signatures(first, (dim,)) for dim in dims}
    for sets in _assignments([first.shape[dim] for dim in dims], second.shape, ()):
        loops: list[tuple[int, int, int, int]] = []  # dim of the first, dim of the second, size, stride
        for dim, axes in zip(dims, sets, strict=True):
            order = row_order(rows[dim], axis_signatures(second, axes))
            found = None if order is None else _loops(order.reshape([second.shape[axis] for axis in axes]), axes)
            if found is None:
                break
            loops += [(dim, *loop) for loop in found]
        else:
            return _pattern(loops, first.shape, second.shape)
    return None


def _assignments(
    sizes: Sequence[int], shape: tuple[int, ...], taken: tuple[int, ...]
) -> Iterator[list[tuple[int, ...]]]:
    """Every way to give each size a set of axes with as many slices, so that all wide axes are used once."""
    if not sizes:
        if len(taken) == sum(extent > 1 for extent in shape):
            yield []
        return
    free = tuple(1 if axis in taken else extent for axis, extent in enumerate(shape))
    for axes in axis_sets(free, sizes[0]):
        for others in _assignments(sizes[1:], shape, (*taken, *axes)):
            yield [axes, *others]


def _loops(order: np.ndarray, axes: tuple[int, ...]) -> list[tuple[int, int, int]] | None:
    """(dim, size, stride) of the loops of each of these dims, if their sum is this permutation of `range(order.size)`."""
    if order.flat[0] != 0:
        return None
    loops, total = [], np.zeros((), np.int64)
    for i, axis in enumerate(axes):
        along = order[tuple(slice(None) if k == i else 0 for k in range(order.ndim))]
        if (digits := digits_of(along)) is None:
            return None
        loops += [(axis, *digit) for digit in digits]
        total = total + along.reshape([-1 if k == i else 1 for k in range(order.ndim)])
    return loops if (total == order).all() else None


def _pattern(loops: list[tuple[int, int, int, int]], first: tuple[int, ...], second: tuple[int, ...]) -> Rearrangement:
    left = [[loop for loop in loops if loop[1] == axis] for axis in range(len(second))]
    names = dict(zip((loop for dim in left for loop in dim), string.ascii_lowercase, strict=False))
    right = [sorted((loop for loop in loops if loop[0] == dim), key=lambda loop: -loop[3]) for dim in range(len(first))]
    inner = {loop for dims in (left, right) for dim in dims for loop in dim[1:]}

    def text(dims: list[list[tuple[int, int, int, int]]], *, sized: bool) -> str:
        parts = []
        for dim in dims:
            words = [f"{names[loop]}={loop[2]}" if sized and loop in inner else names[loop] for loop in dim]
            parts.append("1" if not words else words[0] if len(words) == 1 else f"({' '.join(words)})")
        return " ".join(parts)

    return Rearrangement(f"{text(left, sized=True)} -> {text(right, sized=False)}")
