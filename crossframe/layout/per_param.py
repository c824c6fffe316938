"""The per-parameter layout (R07): each parameter is chunked on dim 0, and a rank's chunks lie side by side."""

import math
from dataclasses import dataclass
from functools import cached_property

from crossframe.dtypes import itemsize
from crossframe.errors import LayoutError
from crossframe.layout.pieces import Column, Padding, Piece
from crossframe.mesh import check_rank, check_world_size
from crossframe.params import ParamSpec, check_params

# What allocators align to: a parameter in a shared buffer is as aligned as one in memory of its own.
UNSHARDED_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class PerParamLayout:
    """Parameters of one dtype, each cut into chunks of ceil(rows / world_size) rows, as `torch.chunk` cuts.

    Raises:
        LayoutError: no parameters, mixed dtypes, or a parameter without dims (there is nothing to chunk).

    >>> layout = PerParamLayout((ParamSpec("w", (5, 3)),), world_size=4)
    >>> [layout.shard_shape(0, rank) for rank in range(4)]
    [(2, 3), (2, 3), (1, 3), (0, 3)]
    """

    params: tuple[ParamSpec, ...]
    world_size: int

    kind = "per_param"
    contiguous = False

    def __post_init__(self) -> None:
        check_world_size(self.world_size)
        check_params(self.params)
        if not self.params:
            raise LayoutError("a per-parameter layout needs at least one parameter, got none")
        for param in self.params:
            if not param.shape:
                raise LayoutError(
                    f"parameter {param.name!r} has no dims: expected at least one to shard on; give it shape (1,)"
                )
            if param.dtype != self.dtype:
                raise LayoutError(
                    f"a bucket holds one dtype: {self.params[0].name!r} is {self.dtype}, "
                    f"{param.name!r} is {param.dtype}; put them into buckets of their own"
                )

    @property
    def dtype(self) -> str:
        """The dtype of the shards."""
        return self.params[0].dtype

    def chunk_rows(self, i: int) -> int:
        """Rows of the first chunk of parameter `i`."""
        return -(-self.params[i].shape[0] // self.world_size)

    def shard_shape(self, i: int, rank: int) -> tuple[int, ...]:
        """Shape of this rank's chunk of parameter `i`; an empty chunk keeps the other dims (R07)."""
        check_rank(rank, self.world_size)
        rows, chunk = self.params[i].shape[0], self.chunk_rows(i)
        return (max(0, min(chunk, rows - rank * chunk)), *self.params[i].shape[1:])

    @property
    def columns(self) -> tuple[Column, ...]:
        """Where each parameter lies in the gathered buffer. Only trailing ranks are short, so all padding of a
        parameter comes after its last element, and its column read row by row begins with the whole parameter."""
        return self._columns

    @cached_property
    def _columns(self) -> tuple[Column, ...]:
        columns, start = [], 0
        for i, param in enumerate(self.params):
            width = self.chunk_rows(i) * math.prod(param.shape[1:])
            columns.append(Column(start, width, param.numel))
            start += width
        return tuple(columns)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each parameter starts in the unsharded buffer that it is copied out to, in elements. Each has room for its
        whole column, so that the copy is one strided read, and starts at a multiple of UNSHARDED_ALIGNMENT_BYTES."""
        return self._unsharded_bounds[:-1]

    @property
    def unsharded_numel(self) -> int:
        """Elements of the unsharded buffer."""
        return self._unsharded_bounds[-1]

    @cached_property
    def _unsharded_bounds(self) -> tuple[int, ...]:
        alignment = UNSHARDED_ALIGNMENT_BYTES // itemsize(self.dtype)
        bounds = [0]
        for column in self.columns:
            end = bounds[-1] + column.width * self.world_size
            bounds.append(end + -end % alignment)
        return tuple(bounds)

    @property
    def padded_shard_numel(self) -> int:
        """Elements of every rank's buffer: the first chunks of all parameters."""
        return self.columns[-1].start + self.columns[-1].width

    @property
    def gathered_numel(self) -> int:
        """Elements of the buffer that an all-gather fills: world_size * padded_shard_numel."""
        return self.padded_shard_numel * self.world_size

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """The non-empty pieces of parameters in this rank's shard, in order (R06)."""
        check_rank(rank, self.world_size)
        found = []
        for param, column in zip(self.params, self.columns, strict=True):
            low, high = min(rank * column.width, param.numel), min((rank + 1) * column.width, param.numel)
            if low < high:
                found.append(Piece(param.name, rank, column.start, column.start + high - low, low, high))
        return tuple(found)

    def padding(self, rank: int) -> tuple[Padding, ...]:
        """The zeros that fill a short chunk up to the size of the first (R07)."""
        runs = []
        for i, column in enumerate(self.columns):
            numel = math.prod(self.shard_shape(i, rank))
            if numel < column.width:
                runs.append(Padding("shard", column.start + numel, column.start + column.width))
        return tuple(runs)

    def to_json(self) -> dict:
        """What `layout_from_json` needs to build this layout again."""
        return {"kind": self.kind, "world_size": self.world_size}
