"""The common part of the flat and the ragged layout: parameters in one line that is cut into equal shards."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

from crossframe.errors import LayoutError
from crossframe.layout.padding import Padding
from crossframe.layout.pieces import Column, Piece, check_elements, check_one_dtype
from crossframe.mesh import check_rank, check_world_size
from crossframe.params import ParamSpec, check_params
from crossframe.quoting import quote


@dataclass(frozen=True)
class LineLayout(ABC):
    """Parameters in order along one line. Rank k holds the `padded_shard_numel` elements from `k * padded_shard_numel` on.

    Subclasses define where each parameter starts, how long the line is, and the kinds of its padding.

    Attributes:
        padded_for: number of ranks that the line is padded for, a multiple of `world_size`; None means `world_size`. A larger
            number cuts the line of that many ranks into fewer, larger shards, as a reshard group does (R08).
    """

    params: tuple[ParamSpec, ...]
    world_size: int
    padded_for: int | None = field(default=None, kw_only=True)

    kind = "line"
    contiguous = True

    def __post_init__(self) -> None:
        check_world_size(self.world_size)
        check_params(self.params)
        check_one_dtype(self.params, self.kind, "convert one, or give them units of their own")
        if self.padded_for is not None:
            check_world_size(self.padded_for)
            if self.padded_for % self.world_size:
                raise LayoutError(
                    f"padded_for: expected a multiple of the world size {self.world_size}, got {quote(self.padded_for)}"
                )
            if self.padded_for == self.world_size:
                object.__setattr__(self, "padded_for", None)

    @property
    def line_ranks(self) -> int:
        """The number of ranks that the line is padded for."""
        return self.padded_for or self.world_size

    @property
    @abstractmethod
    def offsets(self) -> tuple[int, ...]:
        """Where each parameter starts in the line, in elements: at or after the end of the previous one."""

    @property
    @abstractmethod
    def flat_numel(self) -> int:
        """Elements of the line, padding inside it included."""

    @property
    @abstractmethod
    def gathered_numel(self) -> int:
        """Elements of the buffer that an all-gather fills: the line with the padding of the last shards."""

    @property
    def padded_shard_numel(self) -> int:
        """Elements of every rank's buffer."""
        return self.gathered_numel // self.world_size

    @abstractmethod
    def padding(self, rank: int) -> tuple[Padding, ...]:
        """The runs of this rank's shard that belong to no parameter."""

    @property
    def dtype(self) -> str:
        """The dtype of the shards."""
        return self.params[0].dtype

    @property
    def columns(self) -> tuple[Column, ...]:
        """Undefined, since the parameters of a line are contiguous.

        Raises:
            LayoutError: always.
        """
        raise LayoutError(f"a {self.kind} layout is contiguous: use its offsets")

    @cached_property
    def spaces(self) -> tuple[int, ...]:
        """Padding in the gathered buffer, in elements: before each parameter, and after the last one."""
        found, end = [], 0
        for param, start in zip(self.params, self.offsets, strict=True):
            found.append(start - end)
            end = start + param.numel
        return (*found, self.gathered_numel - end)

    @property
    def unsharded_numel(self) -> int:
        """Elements of the unsharded buffer, which is the gathered buffer."""
        return self.gathered_numel

    def shard_range(self, rank: int) -> tuple[int, int]:
        """The range of the line that the rank holds; empty past the last chunk (R04)."""
        check_rank(rank, self.world_size)
        start = min(rank * self.padded_shard_numel, self.flat_numel)
        return start, min(start + self.padded_shard_numel, self.flat_numel)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """The non-empty pieces of parameters in this rank's shard, in order (R06)."""
        start, stop = self.shard_range(rank)
        found = []
        for i in range(max(0, bisect_right(self.offsets, start) - 1), len(self.params)):
            offset, param = self.offsets[i], self.params[i]
            if offset >= stop:
                break
            low, high = max(start, offset), min(stop, offset + param.numel)
            if low < high:
                found.append(Piece(param.name, rank, low - start, high - start, low - offset, high - offset))
        return tuple(found)

    def places(self) -> dict[str, Any]:
        """Where parameters lie, as files state it, so that a reader with other layout rules detects the difference."""
        return {"offsets": list(self.offsets), "padded_shard_numel": self.padded_shard_numel}

    def gaps(self, rank: int) -> Iterator[tuple[int, int]]:
        """The runs of this rank's buffer between, before and after its pieces."""
        covered = 0
        for piece in self.pieces(rank):
            if covered < piece.shard_start:
                yield covered, piece.shard_start
            covered = piece.shard_stop
        if covered < self.padded_shard_numel:
            yield covered, self.padded_shard_numel

    def find(self, i: int, start: int, stop: int) -> Iterator[Piece]:
        """The pieces that hold elements `start:stop` of parameter `i`, clipped to them, in order."""
        check_elements(self.params, i, start, stop)
        return self._find(i, start, stop)

    def _find(self, i: int, start: int, stop: int) -> Iterator[Piece]:
        name, offset, numel = self.params[i].name, self.offsets[i], self.padded_shard_numel
        while start < stop:
            rank, at = divmod(offset + start, numel)
            until = min(stop, start + numel - at)
            yield Piece(name, rank, at, at + until - start, start, until)
            start = until

    def _padded_for(self) -> dict[str, int]:
        """The field of `to_json` that is present only if `padded_for` is not None."""
        return {} if self.padded_for is None else {"padded_for": self.padded_for}

    def over(self, world_size: int) -> Self:
        """The same parameters and options over another number of ranks, and padded for it."""
        return replace(self, world_size=world_size, padded_for=None)

    def cut_over(self, num_ranks: int) -> Self:
        """The same line, padding included, cut over fewer ranks, so that neighboring shards become one.

        Raises:
            LayoutError: `num_ranks` does not divide `line_ranks`.
        """
        return replace(self, world_size=num_ranks, padded_for=self.line_ranks)
