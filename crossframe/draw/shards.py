"""What a drawing of a layout shows: the units, those alike as one; the ranks, those alike as one; what each of them holds.

No work here grows with the number of ranks.
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
from crossframe.shown import shown

# Up to so many ranks of a shard group are shown each by itself.
EACH_BY_ITSELF = 8


@dataclass(frozen=True)
class Held:
    """What each rank of a group of alike ones holds of one thing.

    Attributes:
        start, stop: where it lies in the shard of the group's first rank, in elements.
        range_text: which range of the parameter the first rank has.
        each_text: how much each of them has.
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
        """What this group of ranks holds, in words."""
        return self.each_text if len(group) > 1 else self.range_text


@dataclass(frozen=True)
class Mark:
    """A range of a parameter that a drawing points at.

    Attributes:
        parameter: name of the parameter.
        start, stop: its elements, the parameter taken as one row-major line.
        rank: of the mesh, the one whose part is meant; None for all that hold any of it.

    Raises:
        LayoutError: a range of no elements.
    """

    parameter: str
    start: int
    stop: int
    rank: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise LayoutError(f"mark: expected a range of elements, got {shown(self.start)}:{shown(self.stop)}")

    def within(self, piece: Piece) -> tuple[int, int] | None:
        """Where it lies in the shard of the piece's rank; None where the piece holds nothing of it.

        The runs of a piece lie side by side in the shard, and so does whatever part of them a range of the parameter is.

        >>> piece = Piece("w", 1, 0, 6, 2, 12, num_runs=3, stride=4)  # the right half of a (3, 4) matrix
        >>> Mark("w", 3, 11).within(piece), Mark("w", 4, 6).within(piece)
        ((1, 5), None)
        """
        if piece.name != self.parameter:
            return None
        start, stop = (piece.shard_start + _held_before(piece, at) for at in (self.start, self.stop))
        return (start, stop) if start < stop else None


def _held_before(piece: Piece, element: int) -> int:
    """How many elements of a piece lie in front of this element of the parameter."""
    behind = max(0, element - piece.param_start)
    rows, inside = divmod(behind, piece.stride) if piece.stride else (0, behind)
    return min(rows * piece.run_numel + min(inside, piece.run_numel), piece.numel)


@dataclass(frozen=True)
class Row:
    """A parameter, or the padding of one kind behind it, over all groups of ranks.

    Attributes:
        i: the parameter's index; -1 for padding in front of the first one.
        padding: kind of the padding; None for the parameter itself.
        fill: what the padding is filled with.
        held: for each group of ranks, None where they hold nothing of it.
    """

    i: int
    padding: str | None
    fill: int
    held: tuple[Held | None, ...]


@dataclass(frozen=True)
class DrawnUnit:
    """A unit, and the names of all that are laid out like it.

    Attributes:
        names: of the units, in order; the first one is drawn. None of a layout by itself.
        layout: how it lies.
        mesh: the ranks that hold it.
        rank: the one rank of the mesh to show; None for all.
        mark: what is pointed at, if it is in this unit.
    """

    names: tuple[str, ...]
    layout: Layout
    mesh: MeshSpec
    rank: int | None = None
    mark: Mark | None = None

    @property
    def title(self) -> str:
        """The unit's name, or the first and the last of those alike; "" of a layout by itself."""
        if not self.names:
            return ""
        first, last = (one_line(name) or ROOT for name in (self.names[0], self.names[-1]))
        return first if len(self.names) == 1 else f"{first} … {last} ({len(self.names)} alike)"

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The parameters' names as seen from inside their unit."""
        unit = self.names[0] if self.names else ""
        return tuple(one_line(_inside(param.name, unit)) for param in self.layout.params)

    @property
    def kind(self) -> str:
        """The layout's kind and options in words."""
        layout = self.layout
        if isinstance(layout, FlatLayout):
            kept = f"aligned to {layout.alignment_numel}" if layout.keep_original else "originals not kept"
            return f"flat, {kept}, {layout.dtype}"
        return f"{layout.kind}, {layout.dtype}"

    @property
    def padding_numel(self) -> int:
        """Elements of all ranks' shards together that belong to no parameter."""
        return self.layout.gathered_numel - sum(param.numel for param in self.layout.params)

    @cached_property
    def groups(self) -> tuple[range, ...]:
        """The ranks of the shard group, those that hold alike amounts of the same things together."""
        if self.rank is not None:
            shard_rank = self.mesh.coordinate(self.rank)[1]
            return (range(shard_rank, shard_rank + 1),)
        return alike_ranks(self.layout, self._marked_ranks)

    @cached_property
    def _marked_ranks(self) -> tuple[int, ...]:
        """The place among the shards that is meant by the mark; where all are, those with its first element and its last."""
        mark = self.mark
        if mark is None:
            return ()
        if mark.rank is not None:
            return (mark.rank % self.mesh.shard,)
        i = [param.name for param in self.layout.params].index(mark.parameter)
        return tuple(piece.rank for at in (mark.start, mark.stop - 1) for piece in self.layout.find(i, at, at + 1))

    @cached_property
    def marked(self) -> tuple[tuple[int, int] | None, ...]:
        """Where the mark lies in the shard of each group's first rank, None where it does not."""
        mark = self.mark

        def of(group: range) -> tuple[int, int] | None:
            if mark is None or (mark.rank is not None and self._marked_ranks[0] not in group):
                return None
            found = [at for piece in self.layout.pieces(group[0]) if (at := mark.within(piece))]
            return (min(start for start, _ in found), max(stop for _, stop in found)) if found else None

        return tuple(of(group) for group in self.groups)

    def group_text(self, group: range) -> str:
        """The ranks of the mesh that a group stands for; over replicas, where it stands for many, the shards that they hold."""
        if self.rank is not None:
            return f"rank {self.rank:,}"
        if len(group) > 1 and self.mesh.replicate > 1:
            return f"shards {ranks_text(group)}"
        ranks = group if len(group) > 1 else self.mesh.replicate_group(group[0])
        return f"rank{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)}"

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Parameters in order, each with the paddings behind it."""
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
        # A parameter's own key has no kind, and so comes first.
        order = sorted(held, key=lambda key: (key[0], _KINDS.index(key[1])))
        return tuple(Row(i, kind or None, fill, tuple(held[i, kind, fill])) for i, kind, fill in order)

    def _behind(self, rank: int, run: Padding) -> int:
        """The index of the parameter that a padding of this rank lies behind."""
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
    drawn: Layout | Sharding, unit: str | None, rank: int | None, mark: Mark | None = None
) -> tuple[DrawnUnit, ...]:
    """The units to draw: all, neighbours that are laid out alike as one, or the one of that name. The bucket that holds what is
    marked stands by itself.

    Raises:
        LayoutError: nothing that can be drawn, no such unit, or no such elements to mark.
        MeshError: no such rank.
    """
    alone = isinstance(drawn, LAYOUTS)
    if isinstance(drawn, LAYOUTS):
        drawn = Sharding((("", drawn),), MeshSpec(drawn.world_size))
    if not isinstance(drawn, Sharding):
        raise LayoutError(f"expected a layout or a Sharding to draw, got {shown(drawn)}")
    if rank is not None:
        drawn.mesh.coordinate(rank)
    chosen = [each for each in drawn.units if unit is None or each[0] == unit]
    if not chosen:
        known = list(dict.fromkeys(name for name, _ in drawn.units))
        raise LayoutError(f"no unit is named {shown(unit)}: expected one of {shown(known)}")
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
        DrawnUnit(() if alone else tuple(names), layout, drawn.mesh, rank, held) for names, layout, held in found
    )


def _check_mark(mark: Mark, chosen: Sequence[tuple[str, Layout]], mesh: MeshSpec) -> None:
    if mark.rank is not None:
        mesh.coordinate(mark.rank)
    numel = next((p.numel for _, layout in chosen for p in layout.params if p.name == mark.parameter), None)
    if numel is None:
        raise LayoutError(f"mark: no parameter that is drawn is named {shown(mark.parameter)}")
    if mark.stop > numel:
        raise LayoutError(f"mark: {shown(mark.parameter)} has {numel} elements, got {mark.start}:{mark.stop}")


def alike_ranks(layout: Layout, by_itself: Sequence[int] = ()) -> tuple[range, ...]:
    """The ranks of a layout in order, neighbours that hold the same amounts of the same things together.

    Only where a parameter begins or ends does a rank differ from its neighbours. Few ranks are each a group of their own, and
    so is whichever is to stand by itself.

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
    """Each of these ranks, and what lies between two of them."""
    for i, rank in enumerate(alone):
        if i and rank > alone[i - 1] + 1:
            yield range(alone[i - 1] + 1, rank)
        yield range(rank, rank + 1)


def piece_texts(layout: Layout, i: int, piece: Piece) -> tuple[str, str]:
    """What a piece has of parameter `i`, as a range and as an amount: in rows where the layout cuts between rows and the piece
    has whole ones, else in elements.

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
