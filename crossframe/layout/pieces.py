"""The one question that every layout answers: which piece of which parameter lies where."""

from dataclasses import dataclass
from typing import Any, Protocol

from crossframe.params import ParamSpec


@dataclass(frozen=True)
class Piece:
    """A run of elements of one parameter that one rank holds. Ranges are half-open, in elements (R06).

    `shard_start:shard_stop` is where it lies in the rank's shard; `param_start:param_stop` which elements of the
    parameter these are, the parameter taken as one row-major line.
    """

    name: str
    rank: int
    shard_start: int
    shard_stop: int
    param_start: int
    param_stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.param_stop - self.param_start


@dataclass(frozen=True)
class Column:
    """Where a parameter lies in the gathered buffer seen as (world_size, padded_shard_numel): the columns
    `start:start + width`, read row by row, of which the first `numel` elements are the parameter."""

    start: int
    width: int
    numel: int


class Layout(Protocol):
    """What engines and the reference ask of any layout of one bucket.

    `contiguous` says that each parameter is one unbroken run of the gathered buffer, which then is the unsharded buffer
    too. Otherwise parameter i is `columns[i]` of it, and is copied out. In the unsharded buffer it starts at `offsets[i]`.
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
    def padding(self, rank: int) -> tuple["Padding", ...]: ...
    def to_json(self) -> dict: ...


@dataclass(frozen=True)
class Padding:
    """A run of a rank's shard that belongs to no parameter.

    `kind` is "alignment" (between parameters, R02), "divisibility" (the tail of a flat parameter, R03) or "shard" (the
    end of one rank's buffer, R03, R04, R07). `fill` is the value that torch stores there (R05).
    """

    kind: str
    start: int
    stop: int

    @property
    def fill(self) -> int:
        """42 inside torch's flat parameter, 0 at the end of a shard (R05)."""
        return 0 if self.kind == "shard" else 42


def views(layout: Layout, gathered: Any) -> dict[str, Any]:
    """The parameters in a gathered buffer, or in a buffer of gradients laid out like one.

    Args:
        gathered: numpy or JAX array of shape (gathered_numel,).

    Returns:
        Arrays by name, in the parameters' shapes; padding is in none of them. Where the layout is contiguous and the
        framework has views, they alias `gathered`.
    """
    found = {}
    for i, spec in enumerate(layout.params):
        if layout.contiguous:
            line = gathered[layout.offsets[i] : layout.offsets[i] + spec.numel]
        else:
            column = layout.columns[i]
            table = gathered.reshape(layout.world_size, layout.padded_shard_numel)
            line = table[:, column.start : column.start + column.width].reshape(-1)[: column.numel]
        found[spec.name] = line.reshape(spec.shape)
    return found
