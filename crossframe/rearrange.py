"""Rearrangements between an array of one model and a parameter of another one, in the notation of einops, such as
"i h w=4 -> (h w) i"."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from crossframe.errors import MappingError
from crossframe.quoting import quote

_TOKEN = re.compile(
    r"([A-Za-z_]\w*)(?:=([1-9]\d*)|\[(\d+):(\d+)/(\d+)\]|\{(\d+(?:,\d+)+)\})?|\[(\d+)/(\d+)\]|1(?!\w)|\S"
)
_RANGE = re.compile(r"\[\d+:\d+/\d+\]")
Side = tuple[tuple[str, ...], ...]
"""The axes in each dim of one side; a dim of size 1 has none."""


@dataclass(frozen=True)
class _Parsed:
    """A pattern.

    Attributes:
        left, right: the axes of each side. An axis of which only one index is taken has a name that begins with "[".
        sizes: the stated sizes of axes, as far as they belong to the parameter.
        cuts: (start, stop, size) of the axes before it of which only these indices are taken.
        pads: (elements before, elements after) of the dims after it that are padded.
        orders: of the axes before it whose indices are taken in another order, this order.
        joint: the dim after it in which several arrays are joined, and the number of its axes before the joint; None: unstated.
    """

    left: Side
    right: Side
    sizes: Mapping[str, int]
    cuts: Mapping[str, tuple[int, int, int]]
    pads: Mapping[int, tuple[int, int]]
    orders: Mapping[str, tuple[int, ...]]
    joint: tuple[int, int] | None


@dataclass(frozen=True)
class Rearrangement:
    """A rearrangement of the elements of an array; nothing is computed.

    Both sides list the dims of the array, as names of axes. Parentheses join several axes in one dim, the last one varying
    fastest; 1 is a dim of size 1. A size is stated once, as in `w=4`, for all but one axis of each pair of parentheses.

    An array may be a portion of a parameter, or the other way round, which einops does not state:

    - Before the arrow, `[2/12]` is an axis of size 12 of which index 2 belongs to the parameter, for instance one of 12 stacked
      layers. `w[4:8/24]` is an axis of size 24 of which the indices 4 to 7 belong to it.
    - Before the arrow, `g{1,0,2}` is an axis of size 3 whose indices are taken in this order, for instance the gates of a GRU:
      "i (g{1,0,2} h) -> (g h) i".
    - After the arrow, `v[0:50257/50304]` is a dim of size 50304 whose other indices are padding: zeros.
    - After the arrow, `+` is where arrays are joined: in "i h w=8 -> (h + w) i" each head has the rows of the first array,
      then those of the second one. Without it they are joined in front of the first dim.

    Attributes:
        text: the pattern.

    Raises:
        MappingError: an invalid pattern.

    >>> Rearrangement("i h w=4 -> (h w) i").shape((12, 3, 4))
    (12, 12)
    >>> Rearrangement("[1/2] i o -> o i")(np.arange(12).reshape(2, 3, 2)).tolist()
    [[6, 8, 10], [7, 9, 11]]
    >>> Rearrangement("(g{1,2,0} h) -> (g h)")(np.arange(6)).tolist()
    [2, 3, 4, 5, 0, 1]
    """

    text: str

    def __post_init__(self) -> None:
        self._parsed  # noqa: B018 (raises for an invalid pattern)

    @classmethod
    def transposing(cls, axes: tuple[int, ...]) -> "Rearrangement":
        """The rearrangement that `numpy.transpose(array, axes)` is.

        >>> Rearrangement.transposing((1, 2, 0)).text
        'a b c -> b c a'
        """
        names = "abcdefghijklmnopqrstuvwxyz"[: len(axes)]
        return cls(f"{' '.join(names)} -> {' '.join(names[i] for i in axes)}")

    @classmethod
    def with_ones(cls, before: tuple[int, ...], after: tuple[int, ...]) -> "Rearrangement | None":
        """The rearrangement that only adds or removes dims of size 1; None if the shapes differ otherwise.

        >>> Rearrangement.with_ones((3, 4), (1, 3, 4)).text
        'a b -> 1 a b'
        """
        if [size for size in before if size != 1] != [size for size in after if size != 1]:
            return None
        sides = []
        for shape in (before, after):
            names = iter("abcdefghijklmnopqrstuvwxyz")
            sides.append(" ".join("1" if size == 1 else next(names) for size in shape))
        return cls(" -> ".join(sides))

    @property
    def left(self) -> Side:
        """The axes in each dim before it."""
        return self._parsed.left

    @property
    def right(self) -> Side:
        """The axes in each dim after it."""
        return self._parsed.right

    @property
    def selects(self) -> bool:
        """Whether only a portion of the array belongs to the parameter."""
        return bool(self._parsed.cuts)

    @property
    def orders(self) -> Mapping[str, tuple[int, ...]]:
        """Of the axes whose indices are taken in another order, this order."""
        return self._parsed.orders

    @property
    def pads(self) -> bool:
        """Whether the parameter has padding."""
        return bool(self._parsed.pads)

    @cached_property
    def axes(self) -> tuple[int, ...] | None:
        """The argument of `numpy.transpose` that does the same; None if dims are joined, split, added, removed, cut, padded or
        permuted."""
        parsed = self._parsed
        if parsed.cuts or parsed.pads or parsed.joint or parsed.orders:
            return None
        if all(len(dim) == 1 for side in (self.left, self.right) for dim in side):
            return tuple(self.left.index(dim) for dim in self.right)
        return None

    @property
    def is_identity(self) -> bool:
        """Whether it changes nothing, neither the order of elements nor the shape.

        >>> Rearrangement("a 1 b -> a 1 b").is_identity, Rearrangement("a b -> a 1 b").is_identity
        (True, False)
        """
        return self.is_reshape and self.left == self.right

    @property
    def is_reshape(self) -> bool:
        """Whether it keeps all elements in their order."""
        parsed = self._parsed
        names = [[name for dim in side for name in dim] for side in (parsed.left, parsed.right)]
        return names[0] == names[1] and not (parsed.cuts or parsed.pads or parsed.joint or parsed.orders)

    @cached_property
    def inverse(self) -> "Rearrangement":
        """The rearrangement back, of one that takes all elements and adds none."""
        assert not (self._parsed.cuts or self._parsed.pads or self._parsed.joint), self.text
        left, _, right = self.text.partition("->")
        stated = {name: f"{name}={size}" for name, size in self._parsed.sizes.items()}
        stated |= {name: f"{name}{order_text(np.argsort(order))}" for name, order in self.orders.items()}
        bare = [re.sub(r"=\d+|\{[\d,]+\}", "", side).strip() for side in (right, left)]
        before = re.sub(r"[A-Za-z_]\w*", lambda name: stated.get(name[0], name[0]), bare[0])
        return Rearrangement(f"{before} -> {bare[1]}")

    @property
    def without_padding(self) -> str:
        """The pattern for the parameter without its padding."""
        before, _, after = self.text.partition("->")
        return f"{before}->{_RANGE.sub('', after)}"

    def trimming(self, shape: tuple[int, ...]) -> str:
        """The pattern that removes the padding of a parameter of this shape."""
        names = "abcdefghijklmnopqrstuvwxyz"[: len(shape)]
        left = list(names)
        for dim, (before, after) in self._parsed.pads.items():
            left[dim] += f"[{before}:{shape[dim] - after}/{shape[dim]}]"
        return f"{' '.join(left)} -> {' '.join(names)}"

    # From the array to the parameter

    def __call__(self, array: Any) -> Any:
        """Rearrange a numpy or JAX array; of one with padding or a joint this is the part before `join`.

        Raises:
            MappingError: the pattern does not fit its shape.
        """
        if self.axes is not None:
            self._check(tuple(array.shape))
            return array.transpose(self.axes)
        sizes = self._fit(tuple(array.shape))
        array = array.reshape(self._whole_sizes(sizes))
        if self.selects:
            array = array[self._slices]
        for dim, order in self._reordered:
            array = array.take(order, axis=dim)
        return array.transpose(self._order).reshape(_shape(self.right, sizes))

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape after it of an array that has this shape before it.

        Raises:
            MappingError: the pattern does not fit.
        """
        return _shape(self.right, self._fit(shape))

    def places(self, shape: tuple[int, ...], places: np.ndarray) -> np.ndarray:
        """The places in the flattened result of elements of a flattened array of this shape, all of which it takes.

        >>> Rearrangement("a b -> b a").places((2, 3), np.arange(6)).tolist()
        [0, 2, 4, 1, 3, 5]
        """
        assert not (self._parsed.cuts or self._parsed.pads or self._parsed.joint), self.text
        sizes = self._fit(shape)
        names = [name for dim in self.left for name in dim]
        if not names:
            return places
        at = dict(zip(names, np.unravel_index(places, [sizes[name] for name in names]), strict=True))
        at |= {name: np.argsort(order)[at[name]] for name, order in self.orders.items()}
        after = [name for dim in self.right for name in dim]
        return np.ravel_multi_index([at[name] for name in after], [sizes[name] for name in after])

    def join(self, parts: Sequence[Any]) -> Any:
        """The parameter from the parts of its arrays.

        Raises:
            MappingError: the parts have other shapes beside the joint.
        """
        whole = parts[0]
        if len(parts) > 1:
            dim, _ = self._joint
            shapes = self._all_opened([part.shape for part in parts])
            whole = _concatenate([part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)], dim + 1)
            whole = whole.reshape((*whole.shape[:dim], -1, *whole.shape[dim + 2 :]))
        for dim, ends in self._parsed.pads.items():
            whole = _concatenate([_zeros(whole, dim, ends[0]), whole, _zeros(whole, dim, ends[1])], dim)
        return whole

    def join_shapes(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The shape of the parameter, from the shapes of its parts.

        Raises:
            MappingError: the parts have other shapes beside the joint.
        """
        found, (dim, _) = list(shapes[0]), self._joint
        if len(shapes) > 1:
            self._all_opened(shapes)
            found[dim] = sum(shape[dim] for shape in shapes)
        for dim, ends in self._parsed.pads.items():
            found[dim] += sum(ends)
        return tuple(found)

    # From the parameter to the array

    def back(self, part: Any) -> Any:
        """The array of a part; of one that takes a portion of an array, this portion, with all axes apart."""
        sizes = self._fit_after(tuple(part.shape))
        before = [name for dim in self.left for name in dim]
        names = [name for dim in self.right for name in dim] + self._indices
        apart = part.reshape([sizes[name] for name in names]).transpose([names.index(name) for name in before])
        for dim, order in self._reordered:
            apart = apart.take(np.argsort(order), axis=dim)
        return apart if self.selects else apart.reshape(_shape(self.left, sizes))

    def back_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the array whose part has this shape."""
        sizes = self._fit_after(shape) | {name: total for name, (_, _, total) in self._parsed.cuts.items()}
        return _shape(self.left, sizes)

    def write(self, array: np.ndarray, part: np.ndarray) -> None:
        """Write a part to its place in a contiguous array."""
        sizes = self._fit(array.shape)
        view = array.reshape(self._whole_sizes(sizes))
        assert np.shares_memory(view, array) or not array.size
        view[self._slices] = self.back(part).reshape(view[self._slices].shape)

    def unpadded(self, array: Any) -> Any:
        """A parameter without its padding."""
        for dim, (before, after) in self._parsed.pads.items():
            array = array[(slice(None),) * dim + (slice(before, array.shape[dim] - after),)]
        return array

    def unpadded_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a parameter of this shape without its padding."""
        return tuple(size - sum(self._parsed.pads.get(dim, (0, 0))) for dim, size in enumerate(shape))

    def split(self, array: Any, start: int, stop: int) -> Any:
        """The part of a parameter without padding that has these of its indices in the dim of the joint."""
        dim, _ = self._joint
        shape = self.split_shape(array.shape, start, stop)
        outer = self._opened(shape)[dim]
        opened = array.reshape((*array.shape[:dim], outer, array.shape[dim] // outer, *array.shape[dim + 1 :]))
        return opened[(slice(None),) * (dim + 1) + (slice(start // outer, stop // outer),)].reshape(shape)

    def split_shape(self, shape: tuple[int, ...], start: int, stop: int) -> tuple[int, ...]:
        """The shape of the array that `split` returns."""
        dim, _ = self._joint
        return (*shape[:dim], stop - start, *shape[dim + 1 :])

    @property
    def joint_dim(self) -> int:
        """The dim of the parameter in which several arrays are joined."""
        return self._joint[0]

    @property
    def _joint(self) -> tuple[int, int]:
        return self._parsed.joint or (0, 0)

    def _opened(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a part whose dim of the joint is cut in two: the axes before it, and those after it."""
        dim, num = self._joint
        outer = math.prod(self._fit_after(tuple(shape))[name] for name in self.right[dim][:num]) if num else 1
        return (*shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :])

    def _all_opened(self, shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """The same of all parts of a parameter."""
        found, dim = [self._opened(shape) for shape in shapes], self._joint[0]
        if len({(*opened[: dim + 1], *opened[dim + 2 :]) for opened in found}) > 1:
            raise MappingError(
                f"pattern {self.text!r}: expected parts that differ in the axes after the joint alone, got shapes "
                f"{', '.join(str(tuple(shape)) for shape in shapes)}"
            )
        return found

    def sizes(self, shape: tuple[int, ...]) -> Mapping[str, int]:
        """The size of each axis for an array of this shape, as far as it belongs to the parameter."""
        return self._fit(shape)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of this shape can be rearranged."""
        try:
            self._fit(shape)
        except MappingError:
            return False
        return True

    def joins(self, shape: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        """The dims after it that join several axes, for an array that has this shape before it: of each axis the size, and its
        rank by position before.

        >>> Rearrangement("i h w=4 -> (h w) i").joins((12, 3, 4)) == Rearrangement("h w=4 -> (h w)").joins((3, 4))
        True
        """
        sizes, before = self._fit(shape), [name for dim in self.left for name in dim]
        ranks = [sorted(dim, key=before.index) for dim in self.right]
        return {
            tuple((sizes[name], rank.index(name)) for name in dim)
            for dim, rank in zip(self.right, ranks, strict=True)
            if len(dim) > 1
        }

    @cached_property
    def _indices(self) -> list[str]:
        """The axes of which only one index is taken, which are not axes after it."""
        after = {name for dim in self.right for name in dim}
        return [name for dim in self.left for name in dim if name not in after]

    @cached_property
    def _order(self) -> list[int]:
        before = [name for dim in self.left for name in dim]
        return [before.index(name) for name in [*(name for dim in self.right for name in dim), *self._indices]]

    @cached_property
    def _slices(self) -> tuple[slice, ...]:
        cuts = self._parsed.cuts
        return tuple(slice(*cuts[name][:2]) if name in cuts else slice(None) for dim in self.left for name in dim)

    @cached_property
    def _reordered(self) -> list[tuple[int, np.ndarray]]:
        """The place among the axes before it of each axis with another order of indices, and this order."""
        before = [name for dim in self.left for name in dim]
        return [(before.index(name), np.array(order)) for name, order in self.orders.items()]

    def _whole_sizes(self, sizes: Mapping[str, int]) -> list[int]:
        """The sizes of the axes of the whole array."""
        cuts = self._parsed.cuts
        return [cuts[name][2] if name in cuts else sizes[name] for dim in self.left for name in dim]

    def _check(self, shape: tuple[int, ...]) -> None:
        if len(shape) != len(self.left):
            raise MappingError(f"expected {len(self.left)} dims for {self.text!r}, got shape {shape}")

    def _fit(self, shape: tuple[int, ...]) -> dict[str, int]:
        """The size of each axis, as far as it belongs to the parameter, for an array of this shape."""
        self._check(shape)
        totals = {name: total for name, (_, _, total) in self._parsed.cuts.items()}
        return self._sizes_in(self.left, shape, dict(self._parsed.sizes) | totals) | dict(self._parsed.sizes)

    def _fit_after(self, shape: tuple[int, ...]) -> dict[str, int]:
        """The size of each axis for a part of this shape."""
        if len(shape) != len(self.right):
            raise MappingError(f"expected {len(self.right)} dims after {self.text!r}, got shape {shape}")
        return self._sizes_in(self.right, shape, dict(self._parsed.sizes))

    def _sizes_in(self, side: Side, shape: tuple[int, ...], found: dict[str, int]) -> dict[str, int]:
        for dim, size in zip(side, shape, strict=True):
            unknown = [name for name in dim if name not in found]
            known = math.prod(found[name] for name in dim if name in found)
            if (unknown and size % known) or (not unknown and size != known):
                raise MappingError(f"{self.text!r} does not fit shape {shape}: dim {dim or 1} has size {size}")
            found |= dict.fromkeys(unknown, size // known)
        return found

    @cached_property
    def _parsed(self) -> _Parsed:
        texts = self.text.split("->") if isinstance(self.text, str) else []
        if len(texts) != 2:
            raise MappingError(f"expected a pattern such as 'i o -> o i', got {quote(self.text)}")
        found = _Reader(self.text)
        left, right = found.side(texts[0], after=False), found.side(texts[1], after=True)
        names = [[name for dim in left for name in dim if name not in found.indices]]
        names.append([name for dim in right for name in dim])
        if sorted(names[0]) != sorted(names[1]) or len(set(names[0])) < len(names[0]):
            raise MappingError(f"pattern {self.text!r}: expected each axis once on each side")
        for side in (left, right):
            for dim in side:
                if len([name for name in dim if name not in found.sizes]) > 1:
                    raise MappingError(
                        f"pattern {self.text!r}: state the sizes of all but one of {' '.join(dim)}, as in w=4"
                    )
        return _Parsed(left, right, found.sizes, found.cuts, found.pads, found.orders, found.joint)


class _Reader:
    """Reads the sides of a pattern; its attributes are those of `_Parsed`."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.sizes: dict[str, int] = {}
        self.cuts: dict[str, tuple[int, int, int]] = {}
        self.pads: dict[int, tuple[int, int]] = {}
        self.orders: dict[str, tuple[int, ...]] = {}
        self.joint: tuple[int, int] | None = None
        self.indices: set[str] = set()

    def side(self, text: str, *, after: bool) -> Side:
        """The axes of each dim of one side."""
        dims: list[list[str]] = []
        inside = False
        for token in _TOKEN.finditer(text):
            name = token[1] or (token[0] + "'" * len(self.indices) if token[7] else None)
            if token[0] == "(" and not inside:
                dims.append([])
                inside = True
            elif token[0] == ")" and inside:
                inside = False
            elif token[0] == "+" and after and self.joint is None:
                if not inside:
                    dims.append([])
                self.joint = len(dims) - 1, len(dims[-1]) if inside else 0
            elif token[0] == "1" and not inside:
                dims.append([])
            elif name and not (after and token[7]):
                if not inside:
                    dims.append([])
                self._note(token, name, len(dims) - 1, after=after, alone=not inside)
                dims[-1].append(name)
            else:
                raise MappingError(f"pattern {self._text!r}: unexpected {token[0]!r}")
        if inside:
            raise MappingError(f"pattern {self._text!r}: a parenthesis is not closed")
        return tuple(map(tuple, dims))

    def _note(self, token: re.Match, name: str, dim: int, *, after: bool, alone: bool) -> None:
        """Note the stated size, index or range of an axis."""
        size = token[2] and int(token[2])
        if token[3] or token[7]:
            start, total = int(token[3] or token[7]), int(token[5] or token[8])
            stop = int(token[4]) if token[3] else start + 1
            if not start < stop <= total or name in self.cuts or (after and not alone):
                raise MappingError(
                    f"pattern {self._text!r}: {token[0]!r}: expected indices inside the axis, once each, and padding only "
                    "of a dim without parentheses"
                )
            size = stop - start
            if after:
                self.pads[dim] = start, total - stop
            else:
                self.cuts[name] = start, stop, total
                self.indices |= {name} if token[7] else set()
        if token[6]:
            order = tuple(map(int, token[6].split(",")))
            if after or sorted(order) != list(range(len(order))):
                raise MappingError(
                    f"pattern {self._text!r}: {token[0]!r}: expected each index of the axis once, and before the arrow"
                )
            self.orders[name], size = order, len(order)
        if size and self.sizes.setdefault(name, size) != size:
            raise MappingError(f"pattern {self._text!r}: axis {name!r} has two sizes")


def order_text(order: Iterable[int]) -> str:
    """The notation of an order of indices."""
    return f"{{{','.join(map(str, order))}}}"


def _shape(side: Side, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[name] for name in dim) for dim in side)


def _concatenate(arrays: Sequence[Any], dim: int) -> Any:
    if all(isinstance(array, np.ndarray) for array in arrays):
        return np.concatenate(arrays, dim)
    return arrays[0].__array_namespace__().concat(arrays, axis=dim)


def _zeros(like: Any, dim: int, size: int) -> Any:
    """Zeros of the dtype of an array and of its shape, but for one dim."""
    shape = (*like.shape[:dim], size, *like.shape[dim + 1 :])
    module = np if isinstance(like, np.ndarray) else like.__array_namespace__()
    return module.zeros(shape, dtype=like.dtype)
