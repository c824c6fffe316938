"""The interface of layouts: which piece of which parameter lies where."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

from crossframe.errors import LayoutError
from crossframe.layout.padding import Padding
from crossframe.params import ParamSpec
from crossframe.quoting import quote


class Run(NamedTuple):
    """`numel` consecutive elements that start at `param_start` in the parameter and at `shard_start` in the shard."""

    shard_start: int
    param_start: int
    numel: int


@dataclass(frozen=True)
class Piece:
    """The part of a parameter that one rank holds. Ranges are half-open and in elements of the flattened parameter (R06).

    A piece consists of `num_runs` runs of `run_numel` consecutive elements. In the parameter they start `stride` elements
    apart, and `param_start:param_stop` spans all of them; in the rank's shard they are adjacent in
    `shard_start:shard_stop`. Only a parameter that is sharded on a dim above 0 (R07) has several runs; a single run has
    stride 0.

    >>> piece = Piece("w", 1, 0, 6, 2, 12, num_runs=3, stride=4)  # the right half of a (3, 4) matrix
    >>> piece.run_numel, [run.param_start for run in piece.runs()]
    (2, [2, 6, 10])
    """

    name: str
    rank: int
    shard_start: int
    shard_stop: int
    param_start: int
    param_stop: int
    num_runs: int = 1
    stride: int = 0

    @property
    def numel(self) -> int:
        """Number of elements held."""
        return self.shard_stop - self.shard_start

    @property
    def run_numel(self) -> int:
        """Number of elements of each run."""
        return self.numel // self.num_runs

    def runs(self) -> Iterator[Run]:
        """The runs in order."""
        numel = self.run_numel
        for k in range(self.num_runs):
            yield Run(self.shard_start + k * numel, self.param_start + k * self.stride, numel)


@dataclass(frozen=True)
class Column:
    """The place of a parameter in the gathered buffer, viewed as (world_size, padded_shard_numel): columns `start:start + width`.

    If the parameter is sharded on dim 0, these columns, read row by row, begin with its `numel` elements, and padding follows.
    If it is sharded on `dim` > 0 there is no padding: each row is one chunk, and the chunks concatenated along `dim` are the
    parameter.
    """

    start: int
    width: int
    numel: int
    dim: int = 0


class Layout(Protocol):
    """The interface of the layout of one bucket.

    If `contiguous`, each parameter is one run of the gathered buffer, which is then the unsharded buffer too. Otherwise
    parameter i is `columns[i]` of the gathered buffer and is copied out of it. In the unsharded buffer it starts at
    `offsets[i]`.

    `find(i, start, stop)` yields the pieces that hold elements `start:stop` of parameter i, clipped to that range, each of one
    run, in the order of the elements. Its time grows with the number of pieces, not with the world size. `over(world_size)`
    has the same parameters and options over another number of ranks.
    """

    @property
    def params(self) -> tuple[ParamSpec, ...]: ...
    @property
    def world_size(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def contiguous(self) -> bool: ...
    @property
    def padded_shard_numel(self) -> int: ...
    @property
    def gathered_numel(self) -> int: ...
    @property
    def unsharded_numel(self) -> int: ...
    @property
    def offsets(self) -> tuple[int, ...]: ...
    @property
    def columns(self) -> tuple[Column, ...]: ...
    def pieces(self, rank: int) -> tuple[Piece, ...]: ...
    def padding(self, rank: int) -> tuple[Padding, ...]: ...
    def find(self, i: int, start: int, stop: int) -> Iterator[Piece]: ...
    def over(self, world_size: int) -> Self: ...
    def places(self) -> dict[str, Any]: ...

    def to_json(self) -> dict: ...


def views(layout: Layout, gathered: Any) -> dict[str, Any]:
    """The parameters in a gathered buffer, or the gradients in a buffer of the same layout.

    Args:
        gathered: numpy or JAX array of shape (gathered_numel,).

    Returns:
        Arrays by name, in the parameters' shapes and without padding. They alias `gathered` if the layout is contiguous and the
        framework has views.
    """
    found = {}
    for i, spec in enumerate(layout.params):
        if layout.contiguous:
            found[spec.name] = gathered[layout.offsets[i] : layout.offsets[i] + spec.numel].reshape(spec.shape)
            continue
        column = layout.columns[i]
        table = gathered.reshape(layout.world_size, layout.padded_shard_numel)
        chunks = table[:, column.start : column.start + column.width]
        if column.dim:
            chunk = list(spec.shape)
            chunk[column.dim] //= layout.world_size
            chunks = chunks.reshape(layout.world_size, *chunk)
            # Move the axis of ranks to just before the dim that it cut, so that reshape joins the two.
            order = (*range(1, column.dim + 1), 0, *range(column.dim + 1, len(chunk) + 1))
            found[spec.name] = chunks.transpose(order).reshape(spec.shape)
        else:
            found[spec.name] = chunks.reshape(-1)[: column.numel].reshape(spec.shape)
    return found


def check_elements(params: tuple[ParamSpec, ...], i: int, start: int, stop: int) -> None:
    """Raise LayoutError unless parameter `i` exists and has elements `start:stop`."""
    if type(i) is not int or not 0 <= i < len(params):
        raise LayoutError(f"expected the index of one of {len(params)} parameters, got {quote(i)}")
    numel = params[i].numel
    if type(start) is not int or type(stop) is not int or not 0 <= start <= stop <= numel:
        raise LayoutError(
            f"parameter {params[i].name!r}: expected a range of its {numel} elements, got {quote(start)} to {quote(stop)}"
        )


def check_one_dtype(params: tuple[ParamSpec, ...], what: str, instead: str) -> None:
    """Raise LayoutError unless there is a parameter and all have one dtype (R11).

    Args:
        what: an adjective for the layout, for the message.
        instead: what to do instead, for the message.
    """
    if not params:
        raise LayoutError(f"a {what} layout needs at least one parameter, got none")
    first = params[0]
    for param in params[1:]:
        if param.dtype != first.dtype:
            raise LayoutError(
                f"a {what} layout holds one dtype: {first.name!r} is {first.dtype}, {param.name!r} is {param.dtype}; "
                f"{instead}"
            )
