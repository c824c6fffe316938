"""Formats a layout as a table of plain text."""

from collections.abc import Iterator, Sequence

from crossframe.draw.amounts import bytes_text, percent_text, ranks_text
from crossframe.draw.shards import EACH_BY_ITSELF, DrawnUnit, Held, Row, drawn_units
from crossframe.dtypes import itemsize
from crossframe.layout import Layout, PerParamLayout, Sharding
from crossframe.mesh import MeshSpec

_NOTHING = "·"


def layout_text(
    drawn: Layout | Sharding,
    *,
    unit: str | None = None,
    rank: int | None = None,
    width: int = 100,
    noun: str = "rank",
) -> str:
    """A table of the elements and the padding that each rank holds.

    A cell is the range of a parameter on a rank, in elements, or in rows if the layout cuts between rows. Padding is written "3
    × 42": three elements with the value 42. Units of equal layout are shown once. If there are many ranks, they are rows of the
    table, and ranks with equal amounts are joined.

    Args:
        drawn: a layout, or the sharding of a model.
        unit: show only the unit of this name.
        rank: show only this rank of the mesh.
        width: characters per line. Ranks are columns if the table fits in it.
        noun: what a rank is called: "shard" if the mesh is a part of a larger one, whose ranks have other numbers.

    Raises:
        LayoutError: `drawn` cannot be drawn, or the unit does not exist.
        MeshError: `rank` is not a rank of the mesh.

    >>> from crossframe.layout import FlatLayout
    >>> from crossframe.params import ParamSpec
    >>> layout = FlatLayout((ParamSpec("w", (3, 2)), ParamSpec("b", (2,))), world_size=4, keep_original=True)
    >>> print(layout_text(layout))  # doctest: +NORMALIZE_WHITESPACE
    flat, aligned to 4, float32
    a shard of 3 elements (12 B) a rank; of 12 in all, 4 of padding (33.3 %)
    <BLANKLINE>
    parameter              shape  offset  rank 0  rank 1  rank 2  rank 3
    w                      (3, 2)       0     0:3     3:6       ·       ·
      alignment padding                      ·       ·  2 × 42       ·
    b                      (2,)         8       ·       ·     0:1     1:2
      divisibility padding                   ·       ·       ·  2 × 42
    """
    units = drawn_units(drawn, unit, rank, noun=noun)
    parts = [_unit_text(each, width) for each in units]
    if len(parts) > 1 or len(units[0].names) > 1:
        parts.append(_total(units))
    return "\n\n".join(parts)


def summary_line(unit: DrawnUnit) -> str:
    """The sizes of a unit's shard and of its padding."""
    layout = unit.layout
    shard, padding = layout.padded_shard_numel, unit.padding_numel
    padded = f"{padding:,} of padding ({percent_text(padding, layout.gathered_numel)})" if padding else "no padding"
    size = bytes_text(shard * itemsize(layout.dtype))
    return f"a shard of {shard:,} elements ({size}) a rank; of {layout.gathered_numel:,} in all, {padded}"


def mesh_line(mesh: MeshSpec) -> str:
    """The number of ranks that hold a unit, if the drawing does not show it.

    >>> mesh_line(MeshSpec(shard=1, replicate=8))
    '8 ranks are replicas: each holds everything'
    """
    if mesh.replicate == 1:
        return f"{mesh.shard:,} ranks" if mesh.shard > EACH_BY_ITSELF else ""
    if mesh.shard == 1:
        return f"{mesh.world_size:,} ranks are replicas: each holds everything"
    return (
        f"{mesh.world_size:,} ranks are {mesh.replicate:,} replicas of {mesh.shard:,} shards: "
        f"rank r holds shard r mod {mesh.shard:,}"
    )


def _total(units: Sequence[DrawnUnit]) -> str:
    def over_all(numel: int, unit: DrawnUnit, each: int = 1) -> int:
        return numel * len(unit.names) * each

    wanted = sum(over_all(sum(p.numel for p in unit.layout.params), unit) for unit in units)
    padding = sum(over_all(unit.padding_numel, unit) for unit in units)
    held = sum(over_all(unit.layout.padded_shard_numel, unit, itemsize(unit.layout.dtype)) for unit in units)
    num_params = sum(over_all(len(unit.layout.params), unit) for unit in units)
    return (
        f"in all: {sum(len(unit.names) for unit in units):,} units, {num_params:,} parameters of {wanted:,} elements, "
        f"{padding:,} of padding ({percent_text(padding, wanted + padding)}); {bytes_text(held)} a rank"
    )


def _unit_text(unit: DrawnUnit, width: int) -> str:
    title = f"{unit.title}: " if unit.names else ""
    head = f"{title}{', '.join(filter(None, (unit.kind, mesh_line(unit.mesh))))}\n{summary_line(unit)}\n\n"
    if max(len(group) for group in unit.groups) == 1 and len(unit.groups) <= EACH_BY_ITSELF:
        text = _by_columns(unit)
        if max(map(len, text.splitlines())) <= width:
            return head + text
    return head + _by_rows(unit)


def _label(unit: DrawnUnit, row: Row) -> str:
    return f"  {row.padding} padding" if row.padding else unit.labels[row.i]


def _facts(unit: DrawnUnit, row: Row) -> list[str]:
    """The name, the shape and the offset of a parameter, in the gathered buffer or in each shard."""
    if row.padding:
        return [_label(unit, row), "", ""]
    layout = unit.layout
    at = layout.columns[row.i].start if isinstance(layout, PerParamLayout) else layout.offsets[row.i]
    return [_label(unit, row), str(layout.params[row.i].shape), f"{at:,}"]


def _by_columns(unit: DrawnUnit) -> str:
    lines = [["parameter", "shape", "offset", *(unit.group_text(group) for group in unit.groups)]]
    for row in unit.rows:
        lines.append([*_facts(unit, row), *(held.range_text if held else _NOTHING for held in row.held)])
    return aligned(lines, left=2)


def _by_rows(unit: DrawnUnit) -> str:
    lines = [
        [
            "parameter",
            "shape",
            "offset",
            "shards" if unit.mesh.replicate > 1 and unit.rank is None else f"{unit.noun}s",
            "hold",
        ]
    ]
    for row in unit.rows:
        facts = _facts(unit, row)
        found = list(_merged(unit, row)) or [("none", _NOTHING)]
        for ranks, text in found:
            lines.append([*facts, ranks, text])
            facts = ["", "", ""]
    return aligned(lines, left=2)


def _merged(unit: DrawnUnit, row: Row) -> Iterator[tuple[str, str]]:
    """Groups of ranks and the parts that they hold; single ranks are joined with neighbors that hold the same amount."""
    merged: list[tuple[range, Held]] = []
    for group, held in zip(unit.groups, row.held, strict=True):
        if held is None:
            continue
        if merged:
            before, had = merged[-1]
            if before.stop == group.start and had.numel == held.numel and max(len(before), len(group)) > 1:
                merged[-1] = (range(before.start, group.stop), had)
                continue
        merged.append((group, held))
    for group, held in merged:
        yield f"{unit.rank:,}" if unit.rank is not None else ranks_text(group), held.text(group)


def aligned(lines: Sequence[Sequence[str]], left: int) -> str:
    """Align lines of cells as columns: the first `left` columns to the left, the others to the right.

    >>> print(aligned([["a", "bb"], ["ccc", "d"]], left=1))
    a    bb
    ccc   d
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at < left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
