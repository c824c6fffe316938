"""The per-parameter layout (R07): each parameter is chunked on one of its dims, and the chunks of a rank are adjacent."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

from crossframe.dtypes import itemsize
from crossframe.errors import LayoutError
from crossframe.layout.padding import Padding
from crossframe.layout.pieces import Column, Piece, check_elements, check_one_dtype
from crossframe.mesh import check_rank, check_world_size
from crossframe.params import ParamSpec, check_params
from crossframe.quoting import quote

# The alignment of allocators: a parameter in a shared buffer is aligned like one in memory of its own.
UNSHARDED_ALIGNMENT_BYTES = 64


class _Cut(NamedTuple):
    """A parameter as `num_runs` rows of `stride` elements. Each rank's chunk is the next `run_numel` elements of every row."""

    num_runs: int
    run_numel: int
    stride: int


@dataclass(frozen=True)
class PerParamLayout:
    """Parameters of one dtype, each cut into chunks of ceil(size / world_size) along one dim, as by `torch.chunk`.

    Attributes:
        params: the parameters in order (R01), one dtype for all of them.
        world_size: the number of ranks.
        dims: the dim on which each parameter is cut; None means dim 0 for all of them. Negative dims count from the end, as in
            torch. They are stored as non-negative dims, or as None if all are 0.

    The size of a dim above 0 must be a multiple of the world size, so that all chunks are equal (R07). A rank's shard is its
    chunk in row-major order. A parameter without dims is cut as one of shape (1,).

    Raises:
        LayoutError: no parameters, mixed dtypes, a dim that does not exist, or a dim above 0 whose size is not a multiple of the
            world size.

    >>> layout = PerParamLayout((ParamSpec("w", (5, 3)),), world_size=4)
    >>> [layout.shard_shape(0, rank) for rank in range(4)]
    [(2, 3), (2, 3), (1, 3), (0, 3)]
    >>> layout = PerParamLayout((ParamSpec("w", (3, 4)),), world_size=2, dims=(1,))
    >>> [tuple(run) for run in layout.pieces(1)[0].runs()]
    [(0, 2, 2), (2, 6, 2), (4, 10, 2)]
    """

    params: tuple[ParamSpec, ...]
    world_size: int
    dims: tuple[int, ...] | None = None

    kind = "per_param"
    contiguous = False

    def __post_init__(self) -> None:
        check_world_size(self.world_size)
        check_params(self.params)
        check_one_dtype(self.params, "per-parameter", "put them into buckets of their own")
        if self.dims is not None:
            object.__setattr__(self, "dims", self._checked_dims(self.dims))

    def _checked_dims(self, dims: tuple[int, ...]) -> tuple[int, ...] | None:
        if not isinstance(dims, tuple) or len(dims) != len(self.params):
            raise LayoutError(f"expected a tuple of {len(self.params)} dims, one a parameter, got {quote(dims)}")
        found = []
        for param, shape, dim in zip(self.params, self.cut_shapes, dims, strict=True):
            num_dims = len(shape)
            if type(dim) is not int or not -num_dims <= dim < num_dims:
                raise LayoutError(
                    f"parameter {param.name!r} of shape {quote(param.shape)}: expected a dim from 0 to {num_dims - 1}, "
                    f"or from {-num_dims} to -1 counted from the end, got {quote(dim)}"
                )
            found.append(dim % num_dims)
            size = shape[dim]
            if found[-1] and size % self.world_size:
                raise LayoutError(
                    f"parameter {param.name!r} of shape {quote(param.shape)}: dim {found[-1]} has size {size}, which is not a "
                    f"multiple of the world size {self.world_size}; shard it on dim 0, which may be uneven, or pad its size"
                )
        return tuple(found) if any(found) else None

    @property
    def dtype(self) -> str:
        """The dtype of the shards."""
        return self.params[0].dtype

    @cached_property
    def cut_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each parameter as it is cut: its own, or (1,) if it has no dims."""
        return tuple(param.shape or (1,) for param in self.params)

    @cached_property
    def shard_dims(self) -> tuple[int, ...]:
        """The dim on which each parameter is cut."""
        return self.dims or (0,) * len(self.params)

    def chunk_rows(self, i: int) -> int:
        """Size of the first chunk of parameter `i` along its shard dim: the number of rows if that is dim 0."""
        return -(-self.cut_shapes[i][self.shard_dims[i]] // self.world_size)

    def shard_shape(self, i: int, rank: int) -> tuple[int, ...]:
        """Shape of this rank's chunk of parameter `i`; an empty chunk keeps the other dims (R07)."""
        check_rank(rank, self.world_size)
        shape, dim, chunk = self.cut_shapes[i], self.shard_dims[i], self.chunk_rows(i)
        return (*shape[:dim], max(0, min(chunk, shape[dim] - rank * chunk)), *shape[dim + 1 :])

    @cached_property
    def filled(self) -> tuple[int, ...]:
        """Indices of the parameters that have elements, and therefore a column of non-zero width."""
        return tuple(i for i, param in enumerate(self.params) if param.numel)

    @cached_property
    def on_dim_0(self) -> bool:
        """Whether every parameter is cut on dim 0."""
        return not any(self.shard_dims)

    @property
    def columns(self) -> tuple[Column, ...]:
        """The column of each parameter in the gathered buffer.

        On dim 0 only trailing ranks have short chunks. All padding of a parameter therefore follows its last element, and its
        column, read row by row, begins with the whole parameter.
        """
        return self._columns

    @cached_property
    def _columns(self) -> tuple[Column, ...]:
        columns, start = [], 0
        for param, dim, cut in zip(self.params, self.shard_dims, self._cuts, strict=True):
            columns.append(Column(start, cut.num_runs * cut.run_numel, param.numel, dim))
            start += columns[-1].width
        return tuple(columns)

    @cached_property
    def _cuts(self) -> tuple[_Cut, ...]:
        cuts = []
        for i, (shape, dim) in enumerate(zip(self.cut_shapes, self.shard_dims, strict=True)):
            num_runs, run_numel = math.prod(shape[:dim]), self.chunk_rows(i) * math.prod(shape[dim + 1 :])
            if self.world_size == 1:  # whole rows are one run
                num_runs, run_numel = 1, num_runs * run_numel
            cuts.append(_Cut(num_runs, run_numel, run_numel * self.world_size))
        return tuple(cuts)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each parameter starts in the unsharded buffer that it is copied to, in elements.

        Each has room for its whole column, so that the copy is one strided read, and starts at a multiple of
        UNSHARDED_ALIGNMENT_BYTES.
        """
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
        return self._padded_shard_numel

    @property
    def gathered_numel(self) -> int:
        """Elements of the buffer that an all-gather fills: world_size * padded_shard_numel."""
        return self._padded_shard_numel * self.world_size

    @cached_property
    def _padded_shard_numel(self) -> int:
        return self.columns[-1].start + self.columns[-1].width

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """The non-empty pieces of parameters in this rank's shard, in order (R06)."""
        check_rank(rank, self.world_size)
        found = []
        for param, column, cut in zip(self.params, self.columns, self._cuts, strict=True):
            low = min(rank * cut.run_numel, column.numel)
            if cut.num_runs > 1 and column.numel:
                high = low + (cut.num_runs - 1) * cut.stride + cut.run_numel
                stop = column.start + column.width
                found.append(Piece(param.name, rank, column.start, stop, low, high, cut.num_runs, cut.stride))
            elif (high := min(low + cut.run_numel, column.numel)) > low:
                found.append(Piece(param.name, rank, column.start, column.start + high - low, low, high))
        return tuple(found)

    def padding(self, rank: int) -> tuple[Padding, ...]:
        """The zeros that pad a short chunk to the size of the first chunk (R07)."""
        runs = []
        for i, column in enumerate(self.columns):
            numel = math.prod(self.shard_shape(i, rank))
            if numel < column.width:
                runs.append(Padding("shard", column.start + numel, column.start + column.width))
        return tuple(runs)

    def find(self, i: int, start: int, stop: int) -> Iterator[Piece]:
        """The pieces that hold elements `start:stop` of parameter `i`, clipped to them, in order, each of one run."""
        check_elements(self.params, i, start, stop)
        return self._find(i, start, stop)

    def _find(self, i: int, start: int, stop: int) -> Iterator[Piece]:
        name, first, cut = self.params[i].name, self.columns[i].start, self._cuts[i]
        while start < stop:
            row, in_row = divmod(start, cut.stride)
            rank, in_run = divmod(in_row, cut.run_numel)
            until = min(stop, start + cut.run_numel - in_run)
            at = first + row * cut.run_numel + in_run
            yield Piece(name, rank, at, at + until - start, start, until)
            start = until

    def over(self, world_size: int) -> Self:
        """The same parameters on the same dims over another number of ranks."""
        return replace(self, world_size=world_size)

    def places(self) -> dict[str, Any]:
        """Where parameters lie, as files state it, so that a reader with other layout rules detects the difference: the size of
        each parameter's first chunk along its dim, and where it starts in a rank's buffer."""
        return {
            "chunks": [self.chunk_rows(i) for i in range(len(self.params))],
            "starts": [column.start for column in self.columns],
            "padded_shard_numel": self.padded_shard_numel,
        }

    def to_json(self) -> dict:
        """What `layout_from_json` needs to build this layout again."""
        dims = list(self.dims) if self.dims else None
        return {"kind": self.kind, "world_size": self.world_size, "dims": dims} | {"places": self.places()}
