"""Rearrangements: reshapes and transpositions of an array, in the notation of einops, such as "i h w=4 -> (h w) i"."""

import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from crossframe.errors import MappingError
from crossframe.quoting import quote

_TOKEN = re.compile(r"([A-Za-z_]\w*)(?:=([1-9]\d*))?|1(?!\w)|\S")
Side = tuple[tuple[str, ...], ...]
"""The axes in each dim of one side; a dim of size 1 has none."""


@dataclass(frozen=True)
class Rearrangement:
    """A rearrangement of the elements of an array; nothing is computed.

    Both sides list the dims of the array, as names of axes. Parentheses join several axes in one dim, the last one varying
    fastest; 1 is a dim of size 1. A size is stated once, as in `w=4`, for all but one axis of each pair of parentheses.

    Attributes:
        text: the pattern.

    Raises:
        MappingError: an invalid pattern.

    >>> Rearrangement("i h w=4 -> (h w) i").shape((12, 3, 4))
    (12, 12)
    """

    text: str

    def __post_init__(self) -> None:
        self._sides  # noqa: B018 (raises for an invalid pattern)

    @classmethod
    def transposing(cls, axes: tuple[int, ...]) -> "Rearrangement":
        """The rearrangement that `numpy.transpose(array, axes)` is.

        >>> Rearrangement.transposing((1, 2, 0)).text
        'a b c -> b c a'
        """
        names = "abcdefghijklmnopqrstuvwxyz"[: len(axes)]
        return cls(f"{' '.join(names)} -> {' '.join(names[i] for i in axes)}")

    @property
    def left(self) -> Side:
        """The axes in each dim before it."""
        return self._sides[0]

    @property
    def right(self) -> Side:
        """The axes in each dim after it."""
        return self._sides[1]

    @cached_property
    def axes(self) -> tuple[int, ...] | None:
        """The argument of `numpy.transpose` that does the same; None if dims are joined, split, added or removed."""
        if all(len(dim) == 1 for side in self._sides for dim in side):
            return tuple(self.left.index(dim) for dim in self.right)
        return None

    @property
    def is_identity(self) -> bool:
        """Whether it changes nothing."""
        return self.axes == tuple(range(len(self.left)))

    @cached_property
    def inverse(self) -> "Rearrangement":
        """The rearrangement back."""
        left, _, right = self.text.partition("->")
        sizes = self._sizes
        bare = [re.sub(r"=\d+", "", side).strip() for side in (right, left)]
        stated = re.sub(
            r"[A-Za-z_]\w*", lambda name: f"{name[0]}={sizes[name[0]]}" if name[0] in sizes else name[0], bare[0]
        )
        return Rearrangement(f"{stated} -> {bare[1]}")

    def __call__(self, array: Any) -> Any:
        """Rearrange a numpy or JAX array.

        Raises:
            MappingError: the pattern does not fit its shape.
        """
        if self.axes is not None:
            self._check(tuple(array.shape))
            return array.transpose(self.axes)
        sizes = self._fit(tuple(array.shape))
        names = [name for dim in self.left for name in dim]
        order = tuple(names.index(name) for dim in self.right for name in dim)
        return array.reshape([sizes[name] for name in names]).transpose(order).reshape(_shape(self.right, sizes))

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape after it of an array that has this shape before it.

        Raises:
            MappingError: the pattern does not fit.
        """
        return _shape(self.right, self._fit(shape))

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

    def _check(self, shape: tuple[int, ...]) -> None:
        if len(shape) != len(self.left):
            raise MappingError(f"expected {len(self.left)} dims for {self.text!r}, got shape {shape}")

    def _fit(self, shape: tuple[int, ...]) -> dict[str, int]:
        """The size of each axis for an array of this shape."""
        self._check(shape)
        found = dict(self._sizes)
        for dim, size in zip(self.left, shape, strict=True):
            unknown = [name for name in dim if name not in found]
            known = math.prod(found[name] for name in dim if name in found)
            if (unknown and size % known) or (not unknown and size != known):
                raise MappingError(f"{self.text!r} does not fit shape {shape}: dim {dim or 1} has size {size}")
            found |= dict.fromkeys(unknown, size // known)
        return found

    @cached_property
    def _parsed(self) -> tuple[Side, Side, dict[str, int]]:
        sizes: dict[str, int] = {}
        texts = self.text.split("->") if isinstance(self.text, str) else []
        if len(texts) != 2:
            raise MappingError(f"expected a pattern such as 'i o -> o i', got {quote(self.text)}")
        left, right = (self._side(text, sizes) for text in texts)
        names = [[name for dim in side for name in dim] for side in (left, right)]
        if sorted(names[0]) != sorted(names[1]) or len(set(names[0])) < len(names[0]):
            raise MappingError(f"pattern {self.text!r}: expected each axis once on each side")
        for side in (left, right):
            for dim in side:
                if len([name for name in dim if name not in sizes]) > 1:
                    raise MappingError(
                        f"pattern {self.text!r}: state the sizes of all but one of {' '.join(dim)}, as in w=4"
                    )
        return left, right, sizes

    def _side(self, text: str, sizes: dict[str, int]) -> Side:
        dims: list[tuple[str, ...]] = []
        inside: list[str] | None = None
        for token in _TOKEN.finditer(text):
            name, size = token[1], token[2]
            if token[0] == "(" and inside is None:
                inside = []
            elif token[0] == ")" and inside is not None:
                dims.append(tuple(inside))
                inside = None
            elif token[0] == "1" and inside is None:
                dims.append(())
            elif name:
                if size and sizes.setdefault(name, int(size)) != int(size):
                    raise MappingError(f"pattern {self.text!r}: axis {name!r} has two sizes")
                if inside is None:
                    dims.append((name,))
                else:
                    inside.append(name)
            else:
                raise MappingError(f"pattern {self.text!r}: unexpected {token[0]!r}")
        if inside is not None:
            raise MappingError(f"pattern {self.text!r}: a parenthesis is not closed")
        return tuple(dims)

    @property
    def _sides(self) -> tuple[Side, Side]:
        return self._parsed[:2]

    @property
    def _sizes(self) -> dict[str, int]:
        return self._parsed[2]


def _shape(side: Side, sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[name] for name in dim) for dim in side)
