"""Portions of arrays: which rows of an array another array is, and the pattern that states it."""

import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from crossframe.alignment.slices import axis_sets
from crossframe.alignment.solve import row_order
from crossframe.rearrange import Rearrangement, order_text

Signatures = Mapping[tuple[int, ...], np.ndarray]
"""The signatures of the slices of an array along sets of its axes."""


@dataclass(frozen=True)
class Rows:
    """Rows of an array along one of its dims: in each of several equal blocks the same run.

    Attributes:
        dim: the dim of the array.
        blocks: number of blocks.
        start, count, period: the run within a block, and the size of the block.
    """

    dim: int
    blocks: int
    start: int
    count: int
    period: int

    @property
    def stop(self) -> int:
        return self.start + self.count

    @property
    def total(self) -> int:
        """The number of rows in all blocks."""
        return self.blocks * self.count

    def of(self, array: np.ndarray) -> np.ndarray:
        """These rows of the array."""
        before, after = array.shape[: self.dim], array.shape[self.dim + 1 :]
        apart = array.reshape(*before, self.blocks, self.period, *after)
        return apart[(slice(None),) * (self.dim + 1) + (slice(self.start, self.stop),)].reshape(
            *before, self.total, *after
        )


def rows_of(dim: int, rows: np.ndarray, size: int, shape: tuple[int, ...], signatures: Signatures) -> Rows | None:
    """The rows of an array that another, smaller array is; None if it is none.

    Args:
        dim: of the array.
        rows: signatures of its rows along this dim.
        size: number of its elements.
        shape, signatures: of the other array, by its axes.
    """
    width = size // len(rows)
    count, rest = divmod(math.prod(shape), width) if width else (0, 1)
    if rest or not 0 < count < len(rows):
        return None
    for axes in axis_sets(shape, count) if count > 1 else [()]:
        order = row_order(rows, signatures[axes]) if axes in signatures else None
        if order is not None and (found := _run_in_blocks(dim, np.sort(order), len(rows))) is not None:
            return found
    return None


def _run_in_blocks(dim: int, places: np.ndarray, num_rows: int) -> Rows | None:
    """The run of which sorted places consist; None if they are not the same run of equal blocks."""
    run = int(np.argmin(np.append(np.diff(places) == 1, False))) + 1
    for count in (run, len(places)):
        num, rest = divmod(len(places), count)
        if rest or num_rows % num:
            continue
        found = Rows(dim, num, int(places[0]), count, num_rows // num)
        wanted = found.start + found.period * np.arange(num)[:, None] + np.arange(count)
        if found.stop <= found.period and np.array_equal(wanted.reshape(-1), places):
            return found
    return None


def joined_text(form: Rearrangement, shape: tuple[int, ...], rows: Rows, *, apart: bool) -> str | None:
    """The pattern of one of several arrays that are joined along a dim of a parameter.

    Args:
        form: from the array to its rows of the parameter.
        shape: of the array.
        rows: of the array in the parameter.
        apart: state an axis for the rows within a block even if it has size 1, since other arrays have more of them.

    Returns:
        The pattern with the joint; None if no axis ends at the end of a block.
    """
    if rows.dim == 0 and rows.blocks == 1:
        return form.text
    found = _blocks_apart(form, shape, form.right[rows.dim], rows.blocks, apart=apart)
    if found is None:
        return None
    left, right, sizes, num = found
    behind = right[rows.dim][num : num + 1]
    right[rows.dim].insert(num, "+")
    return _text(left, right, _stated(left, right, sizes, behind or None), form.orders)


def padded_text(form: Rearrangement, rows: Rows, size: int) -> str | None:
    """The pattern of an array that is the first rows of a parameter of `size` rows; None if these are several axes."""
    if len(form.right[rows.dim]) != 1:
        return None
    before, _, after = form.text.partition(" -> ")
    dims = _dims_of(after)
    dims[rows.dim] += f"[{rows.start}:{rows.stop}/{size}]"
    return f"{before} -> {' '.join(dims)}"


def cut_text(form: Rearrangement, shape: tuple[int, ...], rows: Rows) -> str | None:
    """The pattern of a parameter that is rows of an array.

    Args:
        form: from the rows of the array to the parameter.
        shape: of the rows.
        rows: of the parameter in the array.

    Returns:
        The pattern; None if no axis begins where the rows do.
    """
    found = _blocks_apart(form, shape, form.left[rows.dim], rows.blocks, apart=False)
    if found is None:
        return None
    left, right, sizes, num = found
    stated, members = _stated(left, right, sizes), left[rows.dim]
    if num == len(members):  # each block has one row
        members.append(f"[{rows.start}/{rows.period}]")
    else:
        name, inner = members[num], math.prod(sizes[each] for each in members[num + 1 :])
        if rows.start % inner or rows.period % inner:
            return None
        start = rows.start // inner
        members[num] = f"{name}[{start}:{start + sizes[name]}/{rows.period // inner}]"
    return _text(left, right, stated, form.orders)


def indexed_text(pattern: str | None, num_dims: int, indices: Sequence[tuple[int, int, int]]) -> str:
    """The pattern from an array of which a slice has this pattern.

    Args:
        pattern: None: the same.
        num_dims: of the slice.
        indices: (dim, index, size) of the dims of the array that the slice lacks, in order.

    >>> indexed_text("i o -> o i", 2, [(0, 3, 12)])
    '[3/12] i o -> o i'
    """
    text = Rearrangement.transposing(tuple(range(num_dims))).text if pattern is None else pattern
    before, _, after = text.partition("->")
    dims = _dims_of(before)
    for dim, index, size in indices:
        dims.insert(dim, f"[{index}/{size}]")
    return f"{' '.join(dims)} -> {after.strip()}"


def bias_text(pattern: str, num_dims: int, *, dim: int, after: bool) -> str | None:
    """The pattern of a bias, from that of the weight whose dim it belongs to.

    Args:
        pattern: of the weight.
        num_dims: of the array of the bias.
        dim: of the weight.
        after: whether this is a dim after the rearrangement, else one before it.

    Returns:
        None if the dim has other axes on the other side, or as many dims as the bias has not.

    >>> bias_text("i h w=4 -> (h + w) i", 2, dim=0, after=True)
    'h w=4 -> (h + w)'
    >>> bias_text("i o[0:8/24] -> o i", 1, dim=1, after=False)
    'o[0:8/24] -> o'
    """
    form = Rearrangement(pattern)
    before, _, behind = pattern.partition("->")
    sides = (_dims_of(before), _dims_of(behind))
    axes = (form.left, form.right)
    wanted = [name for name in axes[after][dim] if not name.startswith("[")]
    others = [i for i, names in enumerate(axes[not after]) if set(names) & set(wanted)]
    if sorted(name for i in others for name in axes[not after][i] if not name.startswith("[")) != sorted(wanted):
        return None
    own, rest = sides[after][dim], [sides[not after][i] for i in others]
    left, right = (rest, [own]) if after else ([own], rest)
    if len(left) != num_dims:
        if num_dims != 1 or any("[" in each for each in left):
            return None
        left = [f"({' '.join(each.strip('()') for each in left)})"]
    return f"{' '.join(left)} -> {' '.join(right)}"


def features_text(pattern: str, shape: tuple[int, ...], *, dim: int, num_dims: int) -> str | None:
    """The pattern of activations whose features are one dim of a weight, from the pattern of the weight.

    Args:
        pattern, shape: of the array of the weight.
        dim: of the weight, after the rearrangement.
        num_dims: of the activations after it.

    Returns:
        None if the dim has only some axes of a dim before it.

    >>> features_text("(h c=2 w=4) i -> (c h w) i", (24, 5), dim=0, num_dims=3)
    'a b (h=3 c=2 w=4) -> a b (c h w)'
    >>> features_text("i (g{1,0,2} h) -> (g h) i", (5, 12), dim=0, num_dims=2)
    'a (g{1,0,2} h=4) -> a (g h)'
    """
    form = Rearrangement(pattern)
    wanted, sizes = form.right[dim], form.sizes(shape)
    dims = [names for names in form.left if set(names) & set(wanted)]
    if not wanted or sorted(name for names in dims for name in names) != sorted(wanted):
        return None
    free = (name for name in string.ascii_lowercase if name not in wanted)
    others = [[next(free)] for _ in range(num_dims - 1)]
    left, right = [*others, *map(list, dims)], [*others, list(wanted)]
    return _text(left, right, _stated(left, right, sizes), form.orders)


def _blocks_apart(
    form: Rearrangement, shape: tuple[int, ...], members: tuple[str, ...], blocks: int, *, apart: bool
) -> tuple[list[list[str]], list[list[str]], dict[str, int], int] | None:
    """The axes of both sides, with one cut in two if blocks end inside it; their sizes; the number of axes that are blocks."""
    sizes = dict(form.sizes(shape))
    left, right = ([list(dim) for dim in side] for side in (form.left, form.right))
    outer = 1
    for num, name in enumerate(members):
        if outer == blocks:
            return left, right, sizes, num
        whole, rest = divmod(blocks, outer)
        if rest:
            return None
        if sizes[name] > whole or (apart and sizes[name] == whole):
            if sizes[name] % whole:
                return None
            new = next(each for each in string.ascii_lowercase if each not in sizes)
            sizes |= {name: whole, new: sizes[name] // whole}
            for dim in (*left, *right):
                if name in dim:
                    dim.insert(dim.index(name) + 1, new)
            return left, right, sizes, num + 1
        outer *= sizes[name]
    return (left, right, sizes, len(members)) if outer == blocks else None


def _stated(
    left: list[list[str]], right: list[list[str]], sizes: Mapping[str, int], free: Sequence[str] | None = None
) -> dict[str, int]:
    """The sizes that a pattern states: those of axes in parentheses, but for the free ones, or for those that come first in all
    parentheses."""
    dims = [[name for name in dim if name in sizes] for dim in (*left, *right)]
    dims = [dim for dim in dims if len(dim) > 1]
    inner = {name for dim in dims for name in dim[1:]}
    kept = {name for dim in dims for name in dim if name not in free} if free is not None else inner
    return {name: sizes[name] for name in kept}


def _text(
    left: list[list[str]], right: list[list[str]], stated: Mapping[str, int], orders: Mapping[str, tuple[int, ...]]
) -> str:
    texts = {name: f"{name}={size}" for name, size in stated.items()}
    texts |= {name: f"{name}{order_text(order)}" for name, order in orders.items()}

    def side(dims: list[list[str]], texts: Mapping[str, str]) -> str:
        found = []
        for dim in dims:
            words = [texts.get(name, name) for name in dim]
            found.append("1" if not words else words[0] if len(words) == 1 else f"({' '.join(words)})")
        return " ".join(found)

    return f"{side(left, texts)} -> {side(right, {})}"


def _dims_of(side: str) -> list[str]:
    """The texts of the dims of one side of a pattern."""
    found: list[str] = []
    inside = False
    for word in side.split():
        if inside:
            found[-1] += f" {word}"
        else:
            found.append(word)
        inside = (inside or "(" in word) and ")" not in word
    return found
