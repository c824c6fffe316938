"""Draws a layout as an SVG: a bar for each rank, to scale."""

from collections.abc import Iterator
from textwrap import wrap

from crossframe.draw.amounts import bytes_text, count_ticks, one_line
from crossframe.draw.shards import DrawnUnit, Held, Mark, Row, drawn_units
from crossframe.draw.svg import (
    FONT,
    MARKING,
    MONOSPACE,
    SANS,
    cut,
    document,
    fill_of,
    fits,
    legend,
    number,
    path,
    rect,
    text,
)
from crossframe.draw.table import mesh_line, summary_line
from crossframe.dtypes import itemsize
from crossframe.layout import Layout, Sharding

BAR, GAP, MARGIN = 26, 7, 14
# Maximum number of bars, and how many of them are the last ones.
MOST_BARS, LAST_BARS = 24, 6
# Maximum number of elements of a shard whose elements are drawn as cells.
MOST_CELLS = 64
# Maximum number of other parameters that are named in a drawing with marked elements.
MOST_NAMED = 8
# Height of the pointer to marked elements, and minimum width of the frame around them.
POINTER, LEAST_OUTLINE = 17, 4.0


def layout_svg(
    drawn: Layout | Sharding,
    *,
    unit: str | None = None,
    rank: int | None = None,
    width: int = 760,
    mark: Mark | None = None,
) -> str:
    """An SVG of the elements and the padding that each rank holds.

    Each rank is a bar that shows its shard to scale; ranks with equal amounts are one bar. A parameter has the same colour on all
    ranks. Padding is hatched and labelled with its value. Units of equal layout are drawn once.

    Args:
        drawn: a layout, or the sharding of a model.
        unit: draw only the unit of this name.
        rank: draw only this rank of the mesh.
        width: width of the drawing in pixels.
        mark: a range of elements to point at; all other parameters are pale.

    Raises:
        LayoutError: `drawn` cannot be drawn, or the unit or the marked elements do not exist.
        MeshError: `rank` is not a rank of the mesh.

    >>> from crossframe.layout import FlatLayout
    >>> from crossframe.params import ParamSpec
    >>> layout_svg(FlatLayout((ParamSpec("w", (3,)),), world_size=2, keep_original=True)).startswith("<svg")
    True
    """
    units = drawn_units(drawn, unit, rank, mark)
    body: list[str] = []
    y = float(MARGIN)
    for each in units:
        y = _Panel(each, width).draw(y, body) + 20
    named = ", ".join(each.title or each.kind for each in units)
    about = f"Which rank holds what: {named}"
    if mark is not None:
        about += f"; marked are elements {mark.start:,}:{mark.stop:,} of {one_line(mark.parameter)}"
    return document(width, y - 10, about, [MARKING, *body] if mark else body)


class _Panel:
    """The drawing of one unit."""

    def __init__(self, unit: DrawnUnit, width: int) -> None:
        self.unit = unit
        labels = [unit.group_text(group) for group in unit.groups]
        self.left = MARGIN + min(170, max(len(label) for label in ("elements", *labels)) * SANS * FONT + 12)
        self.right = width - MARGIN
        self.numel = unit.layout.padded_shard_numel
        self.scale = (self.right - self.left) / max(1, self.numel)

    def draw(self, y: float, body: list[str]) -> float:
        """Append the SVG elements, from y downwards; returns the y at their end."""
        unit = self.unit
        if unit.title:
            body.append(text(MARGIN, y + FONT, cut(unit.title, self.right - MARGIN), "name bold"))
            y += 17
        lines = (", ".join(filter(None, (unit.kind, mesh_line(unit.mesh)))), summary_line(unit))
        for line in (part for each in lines for part in wrap(each, int((self.right - MARGIN) / SANS / FONT))):
            body.append(text(MARGIN, y + FONT, line, "soft"))
            y += 17
        y += 9
        count = len(unit.groups)
        left_out = [at for at in range(count) if self._is_left_out(at)]
        for at in range(count):
            if at in left_out:
                if at - 1 not in left_out:
                    last = next(i for i in range(at, count) if i + 1 not in left_out)
                    ranks = range(unit.groups[at].start, unit.groups[last].stop)
                    body.append(text(self.left, y + FONT, f"{unit.group_text(ranks)} are not drawn", "soft"))
                    y += FONT + GAP + 4
                continue
            if marked := unit.marked[at]:
                body.extend(self._pointer(marked, y))
                y += POINTER
            body.extend(self._bar(at, y))
            if marked:
                body.append(self._outline(marked, y))
            y += BAR + GAP
        body.extend(self._axis(y - 2))
        y += 36
        height, elements = legend(MARGIN, y, self.right - MARGIN, list(self._legend()))
        body.extend(elements)
        return y + height

    def _is_left_out(self, at: int) -> bool:
        """Whether this bar is left out because there are too many. Marked bars are always drawn."""
        last = len(self.unit.groups) - LAST_BARS
        return MOST_BARS - LAST_BARS <= at < last and self.unit.marked[at] is None

    def _pointer(self, marked: tuple[int, int], y: float) -> Iterator[str]:
        """A triangle above the marked elements, and their range next to it."""
        unit, mark = self.unit, self.unit.mark
        assert mark is not None
        x = self._x(sum(marked) / 2)
        yield path(f"M{number(x - 5)} {number(y + 6)}h10l-5 8z", "alarm")
        to_the_right = self.right - x >= x - self.left
        room = (self.right - x if to_the_right else x - self.left) - 9
        where = f"{mark.start:,}:{mark.stop:,}"
        if mark.rank is not None and unit.mesh.replicate > 1:
            where = f"rank {mark.rank:,}, {where}"
        label = unit.labels[next(i for i, param in enumerate(unit.layout.params) if param.name == mark.parameter)]
        label = cut(label, room - len(f"{where} of ") * MONOSPACE * FONT)
        at, kind = (x + 9, "name alarm") if to_the_right else (x - 9, "name alarm end")
        yield text(at, y + FONT + 1, f"{where} of {label}", kind)

    def _outline(self, marked: tuple[int, int], y: float) -> str:
        """A frame around the marked elements, of a minimum width."""
        start, stop = marked
        wide = max((stop - start) * self.scale, LEAST_OUTLINE)
        x = min(self._x((start + stop) / 2) - wide / 2, self.right - wide)
        return rect(max(x, self.left), y, wide, BAR, "outline")

    def _bar(self, at: int, y: float) -> Iterator[str]:
        unit, group = self.unit, self.unit.groups[at]
        label = unit.group_text(group)
        yield text(self.left - 10, y + BAR / 2 + 4, cut(label, self.left - MARGIN - 4, SANS), "end soft")
        here = [(row, held) for row in unit.rows if (held := row.held[at])]
        for row, held in here:
            yield self._box(row, held, group, y)
        if 1 < self.numel <= MOST_CELLS:
            cells = "".join(f"M{number(self._x(i))} {number(y)}v{BAR}" for i in range(1, self.numel))
            yield path(cells, "cells")
        for row, held in here:
            yield from self._words(row, held, group, y)
        if self.numel:
            yield rect(self.left, y, self.right - self.left, BAR, "frame")

    def _x(self, element: float) -> float:
        return self.left + element * self.scale

    def _fill(self, i: int) -> str:
        mark = self.unit.mark
        return fill_of(i) if mark is None or self.unit.layout.params[i].name == mark.parameter else f"{fill_of(i)} pale"

    def _box(self, row: Row, held: Held, group: range, y: float) -> str:
        unit, what = self.unit, held.text(group)
        size = bytes_text(held.numel * itemsize(unit.layout.dtype))
        where = f"{unit.group_text(group)}, elements {held.start:,}:{held.stop:,} of the shard"
        if row.padding:
            kind = f"hatch-{row.padding}"
            about = f"{row.padding} padding: {held.numel:,} elements filled with {row.fill} ({size})\n{where}"
        else:
            kind, param = self._fill(row.i), unit.layout.params[row.i]
            about = f"{one_line(param.name)} {param.shape}: {what}, {held.numel:,} elements ({size})\n{where}"
        return rect(self._x(held.start), y, held.numel * self.scale, BAR, kind, about)

    def _words(self, row: Row, held: Held, group: range, y: float) -> Iterator[str]:
        """The longest label that fits in its box."""
        what, room = held.text(group), held.numel * self.scale
        middle, label = self._x((held.start + held.stop) / 2), self.unit.labels[row.i]
        candidates = (what, str(row.fill)) if row.padding else (f"{label} {what}", what, label)
        words = next((words for words in candidates if fits(words, room)), None)
        if words and row.padding:
            half = len(words) * MONOSPACE * FONT / 2 + 3
            yield rect(middle - half, y + 5, 2 * half, BAR - 10, "plate")
        if words:
            yield text(middle, y + BAR / 2 + 4, words, "name middle")

    def _axis(self, y: float) -> Iterator[str]:
        ticks = count_ticks(self.numel)
        marks = "".join(f"M{number(self._x(at))} {number(y)}v4" for at, _ in ticks)
        yield path(f"M{number(self.left)} {number(y)}H{number(self.right)}{marks}", "frame")
        for at, label in ticks:
            yield text(self._x(at), y + 17, label, "middle soft")
        if self._x(ticks[-1][0]) + 20 < self.right - 110:
            yield text(self.right, y + 17, "elements of a shard", "end soft")
        else:
            yield text(self.left - 10, y + 17, "elements", "end soft")

    def _legend(self) -> Iterator[tuple[str, str]]:
        unit = self.unit
        names = [param.name for param in unit.layout.params]
        shown = range(len(names))
        if unit.mark is not None and len(names) > MOST_NAMED:
            shown = (names.index(unit.mark.parameter),)
        for i in shown:
            yield self._fill(i), f"{unit.labels[i]} {unit.layout.params[i].shape}"
        if len(shown) < len(names):
            yield f"{fill_of(shown[0] + 1)} pale", f"the unit's {len(names) - 1} other parameters"
        paddings = dict.fromkeys((row.padding, row.fill) for row in unit.rows if row.padding)
        for kind, fill in paddings:
            yield f"hatch-{kind}", f"{kind} padding, filled with {fill}"
