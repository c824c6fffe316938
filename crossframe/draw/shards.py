"""The content of a drawing of a layout: units and ranks, with equal ones joined, and what each of them holds.

The work does not grow with the number of ranks.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from crossframe.draw.amounts import ROOT, TIMES, one_line, ranks_text
from crossframe.errors import LayoutError
from crossframe.layout import FlatLayout, Layout, Padding, PerParamLayout, Piece, Sharding
from crossframe.layout.sharding import LAYOUTS
from crossframe.mesh import MeshSpec
from crossframe.quoting import quote

# Maximum number of ranks of a shard group that are shown individually.
EACH_BY_ITSELF = 8


@dataclass(frozen=True)
class Held:
    """The part of a parameter or padding that each rank of a group holds.

    Attributes:
        start, stop: its range in the shard of the group's first rank, in elements.
        range_text: the range of the parameter on the first rank.
        each_text: the amount on each rank.
    """

    start: int
    stop: int
    range_text: str
    each_text: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def text(self, group: range) -> str:
        """The text for this group of ranks."""
        return self.each_text if len(group) > 1 else self.range_text


@dataclass(frozen=True)
class Mark:
    """A range of a parameter that a drawing points at.

    Attributes:
        parameter: name of the parameter.
        start, stop: range of elements of the flattened parameter.
        rank: the rank of the mesh whose part is marked; None for all ranks that hold any of it.

    Raises:
        LayoutError: the range is empty.
    """

    parameter: str
    start: int
    stop: int
    rank: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise LayoutError(f"mark: expected a range of elements, got {quote(self.start)}:{quote(self.stop)}")

    def within(self, piece: Piece) -> tuple[int, int] | None:
        """The range of the mark in the shard of the piece's rank; None if the piece has none of its elements.

        The runs of a piece are adjacent in the shard, so that any range of the parameter is one range of the shard.

        >>> piece = Piece("w", 1, 0, 6, 2, 12, num_runs=3, stride=4)  # the right half of a (3, 4) matrix
        >>> Mark("w", 3, 11).within(piece), Mark("w", 4, 6).within(piece)
        ((1, 5), None)
        """
        if piece.name != self.parameter:
            return None
        start, stop = (piece.shard_start + _held_before(piece, at) for at in (self.start, self.stop))
        return (start, stop) if start < stop else None


def _held_before(piece: Piece, element: int) -> int:
    """The number of elements of a piece before this element of the parameter."""
    behind = max(0, element - piece.param_start)
    rows, inside = divmod(behind, piece.stride) if piece.stride else (0, behind)
    return min(rows * piece.run_numel + min(inside, piece.run_numel), piece.numel)


@dataclass(frozen=True)
class Row:
    """A parameter, or the padding of one kind after it, over all groups of ranks.

    Attributes:
        i: index of the parameter; -1 for padding before the first one.
        padding: kind of the padding; None for the parameter itself.
        fill: value of the padding.
        held: the part of each group of ranks; None if they hold none of it.
    """

    i: int
    padding: str | None
    fill: int
    held: tuple[Held | None, ...]


@dataclass(frozen=True)
class DrawnUnit:
    """A unit, and the names of all units with the same layout.

    Attributes:
        names: names of the units in order, the first of which is drawn; empty for a single layout.
        layout: the layout.
        mesh: the ranks that hold it.
        rank: the only rank of the mesh to show; None for all.
        mark: the marked elements, if they are in this unit.
        noun: what a rank of the mesh is called.
    """

    names: tuple[str, ...]
    layout: Layout
    mesh: MeshSpec
    rank: int | None = None
    mark: Mark | None = None
    noun: str = "rank"

    @property
    def title(self) -> str:
        """The name of the unit, or the first and the last of several names; "" for a single layout."""
        if not self.names:
            return ""
        first, last = (one_line(name) or ROOT for name in (self.names[0], self.names[-1]))
        return first if len(self.names) == 1 else f"{first} … {last} ({len(self.names)} alike)"

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The names of the parameters relative to their unit."""
        unit = self.names[0] if self.names else ""
        return tuple(one_line(_inside(param.name, unit)) for param in self.layout.params)

    @property
    def kind(self) -> str:
        """The kind and the options of the layout, as text."""
        layout = self.layout
        if isinstance(layout, FlatLayout):
            kept = f"aligned to {layout.alignment_numel}" if layout.keep_original else "originals not kept"
            return f"flat, {kept}, {layout.dtype}"
        return f"{layout.kind}, {layout.dtype}"

    @property
    def padding_numel(self) -> int:
        """Number of elements of padding in the shards of all ranks."""
        return self.layout.gathered_numel - sum(param.numel for param in self.layout.params)

    @cached_property
    def groups(self) -> tuple[range, ...]:
        """The ranks of the shard group; ranks with equal amounts of the same parameters are joined."""
        if self.rank is not None:
            shard_rank = self.mesh.coordinate(self.rank)[1]
            return (range(shard_rank, shard_rank + 1),)
        return alike_ranks(self.layout, self._marked_ranks)

    @cached_property
    def _marked_ranks(self) -> tuple[int, ...]:
        """The shard indices that the mark selects: that of its rank, or those of its first and last element."""
        mark = self.mark
        if mark is None:
            return ()
        if mark.rank is not None:
            return (mark.rank % self.mesh.shard,)
        i = [param.name for param in self.layout.params].index(mark.parameter)
        return tuple(piece.rank for at in (mark.start, mark.stop - 1) for piece in self.layout.find(i, at, at + 1))

    @cached_property
    def marked(self) -> tuple[tuple[int, int] | None, ...]:
        """The range of the mark in the shard of each group's first rank; None if it has none of its elements."""
        mark = self.mark

        def of(group: range) -> tuple[int, int] | None:
            if mark is None or (mark.rank is not None and self._marked_ranks[0] not in group):
                return None
            found = [at for piece in self.layout.pieces(group[0]) if (at := mark.within(piece))]
            return (min(start for start, _ in found), max(stop for _, stop in found)) if found else None

        return tuple(of(group) for group in self.groups)

    def group_text(self, group: range) -> str:
        """The ranks of the mesh that a group represents; with replicas and several shards, the shards that they hold."""
        if self.rank is not None:
            return f"{self.noun} {self.rank:,}"
        if len(group) > 1 and self.mesh.replicate > 1:
            return f"shards {ranks_text(group)}"
        ranks = group if len(group) > 1 else self.mesh.replicate_group(group[0])
        return f"{self.noun}{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)}"

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Parameters in order, each followed by its padding."""
        layout, count = self.layout, len(self.groups)
        index = {param.name: i for i, param in enumerate(layout.params)}
        held: dict[tuple[int, str, int], list[Held | None]] = {(i, "", 0): [None] * count for i in index.values()}
        for at, group in enumerate(self.groups):
            for piece in layout.pieces(group[0]):
                texts = piece_texts(layout, index[piece.name], piece)
                held[index[piece.name], "", 0][at] = Held(piece.shard_start, piece.shard_stop, *texts)
            for run in layout.padding(group[0]):
                key = (self._behind(group[0], run), run.kind, run.fill)
                text = f"{run.stop - run.start:,} {TIMES} {run.fill}"
                held.setdefault(key, [None] * count)[at] = Held(run.start, run.stop, text, f"{text} each")
        # The key of the parameter itself has no kind, so that it is first.
        order = sorted(held, key=lambda key: (key[0], _KINDS.index(key[1])))
        return tuple(Row(i, kind or None, fill, tuple(held[i, kind, fill])) for i, kind, fill in order)

    def _behind(self, rank: int, run: Padding) -> int:
        """The index of the parameter before a run of padding of this rank."""
        if self.layout.contiguous:
            return bisect_right(self._ends, rank * self.layout.padded_shard_numel + run.start) - 1
        return bisect_right(self._columns, run.start) - 1

    @cached_property
    def _ends(self) -> list[int]:
        return [offset + param.numel for offset, param in zip(self.layout.offsets, self.layout.params, strict=True)]

    @cached_property
    def _columns(self) -> list[int]:
        return [column.start for column in self.layout.columns]


_KINDS = ("", "alignment", "block", "divisibility", "shard")


def _inside(name: str, unit: str) -> str:
    return name[len(unit) + 1 :] if unit and name.startswith(f"{unit}.") else name


def drawn_units(
    drawn: Layout | Sharding, unit: str | None, rank: int | None, mark: Mark | None = None, noun: str = "rank"
) -> tuple[DrawnUnit, ...]:
    """The units to draw: all, with neighbors of equal layout joined, or the one with this name. The bucket with marked elements
    is not joined with others.

    Raises:
        LayoutError: `drawn` cannot be drawn, or the unit or the marked elements do not exist.
        MeshError: `rank` is not a rank of the mesh.
    """
    alone = isinstance(drawn, LAYOUTS)
    if isinstance(drawn, LAYOUTS):
        drawn = Sharding((("", drawn),), MeshSpec(drawn.world_size))
    if not isinstance(drawn, Sharding):
        raise LayoutError(f"expected a layout or a Sharding to draw, got {quote(drawn)}")
    if rank is not None:
        drawn.mesh.coordinate(rank)
    chosen = [each for each in drawn.units if unit is None or each[0] == unit]
    if not chosen:
        known = list(dict.fromkeys(name for name, _ in drawn.units))
        raise LayoutError(f"no unit is named {quote(unit)}: expected one of {quote(known)}")
    if mark is not None:
        _check_mark(mark, chosen, drawn.mesh)
    found: list[tuple[list[str], Layout, Mark | None]] = []
    last = None
    for name, layout in chosen:
        params = [(_inside(p.name, name), p.shape, p.dtype, p.requires_grad) for p in layout.params]
        held = mark if mark and any(p.name == mark.parameter for p in layout.params) else None
        likeness = (layout.to_json(), params, held)
        if likeness == last:
            found[-1][0].append(name)
        else:
            found.append(([name], layout, held))
        last = likeness
    return tuple(
        DrawnUnit(() if alone else tuple(names), layout, drawn.mesh, rank, held, noun) for names, layout, held in found
    )


def _check_mark(mark: Mark, chosen: Sequence[tuple[str, Layout]], mesh: MeshSpec) -> None:
    if mark.rank is not None:
        mesh.coordinate(mark.rank)
    numel = next((p.numel for _, layout in chosen for p in layout.params if p.name == mark.parameter), None)
    if numel is None:
        raise LayoutError(f"mark: no parameter that is drawn is named {quote(mark.parameter)}")
    if mark.stop > numel:
        raise LayoutError(f"mark: {quote(mark.parameter)} has {numel} elements, got {mark.start}:{mark.stop}")


def alike_ranks(layout: Layout, by_itself: Sequence[int] = ()) -> tuple[range, ...]:
    """The ranks of a layout in order; neighbors with equal amounts of the same parameters are joined.

    A rank differs from its neighbors only if a parameter begins or ends in its shard. If there are few ranks, each is a group of
    its own, and so is each rank in `by_itself`.

    >>> from crossframe.params import ParamSpec
    >>> alike_ranks(FlatLayout((ParamSpec("a", (1000,)), ParamSpec("b", (28,))), world_size=257, keep_original=False))
    (range(0, 1), range(1, 249), range(249, 250), range(250, 251), range(251, 256), range(256, 257))
    """
    world_size = layout.world_size
    if world_size <= EACH_BY_ITSELF:
        return tuple(range(rank, rank + 1) for rank in range(world_size))
    alone = {0, world_size - 1, *by_itself}
    for i, param in enumerate(layout.params):
        if param.numel:
            alone |= {piece.rank for at in (0, param.numel - 1) for piece in layout.find(i, at, at + 1)}
    return tuple(_split(sorted(alone)))


def _split(alone: Sequence[int]) -> Iterator[range]:
    """Each of these ranks, and the ranges between two of them."""
    for i, rank in enumerate(alone):
        if i and rank > alone[i - 1] + 1:
            yield range(alone[i - 1] + 1, rank)
        yield range(rank, rank + 1)


def piece_texts(layout: Layout, i: int, piece: Piece) -> tuple[str, str]:
    """The range and the amount of a piece of parameter `i`, as text: in rows if the layout cuts between rows and the piece has
    whole rows, otherwise in elements.

    >>> from crossframe.params import ParamSpec
    >>> layout = PerParamLayout((ParamSpec("w", (4, 3)), ParamSpec("v", (2, 4))), world_size=2, dims=(0, 1))
    >>> [piece_texts(layout, i, piece) for i, piece in enumerate(layout.pieces(1))]
    [('rows 2:4', '2 rows each'), ('[:, 2:4]', '[:, 2 each]')]
    """
    shape = layout.params[i].shape
    if isinstance(layout, PerParamLayout) and (dim := layout.shard_dims[i]):
        start, count = piece.rank * layout.chunk_rows(i), layout.shard_shape(i, piece.rank)[dim]
        front = ":, " * dim
        return f"[{front}{start:,}:{start + count:,}]", f"[{front}{count:,} each]"
    start, stop, row = piece.param_start, piece.param_stop, math.prod(shape[1:])
    if len(shape) > 1 and not isinstance(layout, FlatLayout) and start % row == stop % row == 0:
        rows = (stop - start) // row
        return f"rows {start // row:,}:{stop // row:,}", f"{rows:,} row{'s' if rows > 1 else ''} each"
    return f"{start:,}:{stop:,}", f"{stop - start:,} each"
