"""The flat layout (R02-R06): a unit's parameters in one line, cut into equal shards."""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

from crossframe.dtypes import itemsize
from crossframe.errors import LayoutError
from crossframe.layout.pieces import Column, Padding, Piece
from crossframe.mesh import check_rank, check_world_size
from crossframe.params import ParamSpec, check_params

ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class FlatLayout:
    """One flat parameter and how it is sharded.

    Attributes:
        params: the parameters in order (R01), one dtype for all of them (R11).
        world_size: the number of shards.
        keep_original: whether the original parameters stay visible (`use_orig_params=True`). Then parameters are
            aligned (R02) and the flat parameter is padded to a multiple of the world size (R03).
        compute_dtype: the dtype in which the gathered parameters are used; it sets the alignment (R02). Default: stored.

    Raises:
        LayoutError: no parameters, mixed dtypes, or mixed requires_grad where the original parameters are not kept.

    >>> layout = FlatLayout((ParamSpec("a", (5,)), ParamSpec("b", (2,))), world_size=2, keep_original=True)
    >>> layout.offsets, layout.flat_numel, layout.padded_shard_numel
    ((0, 8), 10, 5)
    >>> [(p.name, p.param_start, p.param_stop) for p in layout.pieces(1)]
    [('b', 0, 2)]
    """

    params: tuple[ParamSpec, ...]
    world_size: int
    keep_original: bool
    compute_dtype: str | None = None

    kind = "flat"
    contiguous = True

    def __post_init__(self) -> None:
        check_world_size(self.world_size)
        check_params(self.params)
        if not self.params:
            raise LayoutError("a flat layout needs at least one parameter, got none")
        if not isinstance(self.keep_original, bool):
            raise LayoutError(f"expected a bool as keep_original, got {self.keep_original!r}")
        first = self.params[0]
        for param in self.params[1:]:
            if param.dtype != first.dtype:
                raise LayoutError(
                    f"a flat unit holds one dtype: {first.name!r} is {first.dtype}, {param.name!r} is {param.dtype}; "
                    "convert one, or give them units of their own"
                )
            if not self.keep_original and param.requires_grad != first.requires_grad:
                raise LayoutError(
                    f"without original parameters a flat unit is trained or frozen as a whole: {first.name!r} has "
                    f"requires_grad={first.requires_grad}, {param.name!r} has {param.requires_grad}; "
                    "pass use_orig_params=True, or give them units of their own"
                )
        if self.compute_dtype is not None:
            itemsize(self.compute_dtype)

    @property
    def dtype(self) -> str:
        """The dtype of the shards."""
        return self.params[0].dtype

    @property
    def alignment_numel(self) -> int:
        """Every parameter starts at a multiple of this many elements (R02)."""
        return max(1, ALIGNMENT_BYTES // itemsize(self.compute_dtype or self.dtype)) if self.keep_original else 1

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each parameter starts in the flat parameter, in elements."""
        return self._offsets

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        offsets, running = [], 0
        for param in self.params:
            running += -running % self.alignment_numel
            offsets.append(running)
            running += param.numel
        return tuple(offsets)

    @property
    def columns(self) -> tuple[Column, ...]:
        """Not defined here: parameters of a flat layout are contiguous."""
        raise LayoutError("a flat layout is contiguous: use its offsets")

    @property
    def flat_numel(self) -> int:
        """Elements of the unsharded flat parameter, padding inside it included (R03)."""
        end = self.offsets[-1] + self.params[-1].numel
        return end + (-end % self.world_size if self.keep_original else 0)

    @property
    def padded_shard_numel(self) -> int:
        """Elements of every rank's buffer (R04)."""
        return -(-self.flat_numel // self.world_size)

    @property
    def gathered_numel(self) -> int:
        """Elements of the buffer that an all-gather fills: world_size * padded_shard_numel."""
        return self.padded_shard_numel * self.world_size

    @property
    def unsharded_numel(self) -> int:
        """Elements of the buffer that holds the unsharded parameters: the gathered one itself."""
        return self.gathered_numel

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Which elements of the flat parameter the rank holds; empty past the last chunk (R04)."""
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

    def padding(self, rank: int) -> tuple[Padding, ...]:
        """The runs of this rank's shard that belong to no parameter (R02, R03, R04)."""
        start, stop = self.shard_range(rank)
        end = self.offsets[-1] + self.params[-1].numel
        runs, covered = [], 0
        for piece in (*self.pieces(rank), None):
            until = piece.shard_start if piece else stop - start
            if covered < until:
                tail = min(max(end - start, covered), until)
                runs += [Padding("alignment", covered, tail)] if covered < tail else []
                runs += [Padding("divisibility", tail, until)] if tail < until else []
            covered = piece.shard_stop if piece else until
        if covered < self.padded_shard_numel:
            runs.append(Padding("shard", covered, self.padded_shard_numel))
        return tuple(runs)

    def to_json(self) -> dict:
        """What `layout_from_json` needs to build this layout again."""
        return {"kind": self.kind, "world_size": self.world_size, "keep_original": self.keep_original,
                "compute_dtype": self.compute_dtype}  # fmt: skip
