"""Who holds what, as an SVG: a bar a rank, to scale."""

from collections.abc import Iterator
from textwrap import wrap

from crossframe.draw.amounts import bytes_text, count_ticks, one_line
from crossframe.draw.shards import DrawnUnit, Held, Row, drawn_units
from crossframe.draw.svg import FONT, MONOSPACE, SANS, cut, document, fill_of, fits, legend, number, path, rect, text
from crossframe.draw.table import mesh_line, summary_line
from crossframe.dtypes import itemsize
from crossframe.layout import Layout, Sharding

BAR, GAP, MARGIN = 26, 7, 14
# More bars than this are not drawn; the first ones and the last are.
MOST_BARS, LAST_BARS = 24, 6
# A shard of no more elements shows each of them as a cell.
MOST_CELLS = 64


def layout_svg(drawn: Layout | Sharding, *, unit: str | None = None, rank: int | None = None, width: int = 760) -> str:
    """Which rank holds which elements of which parameter, and where padding lies, as an SVG.

    Each rank is a bar, its shard to scale; ranks that hold alike amounts are one bar. A parameter has one colour on all
    ranks. Padding is hatched, and says what it is filled with. Units that lie alike are drawn once.

    Args:
        drawn: a layout, or the sharding of a model.
        unit: only the unit of this name.
        rank: only what this rank of the mesh holds.
        width: of the drawing, in pixels.

    Raises:
        LayoutError: nothing that can be drawn, or no such unit.
        MeshError: no such rank.

    >>> from crossframe.layout import FlatLayout
    >>> from crossframe.params import ParamSpec
    >>> layout_svg(FlatLayout((ParamSpec("w", (3,)),), world_size=2, keep_original=True)).startswith("<svg")
    True
    """
    units = drawn_units(drawn, unit, rank)
    body: list[str] = []
    y = float(MARGIN)
    for each in units:
        y = _Panel(each, width).draw(y, body) + 20
    named = ", ".join(each.title or each.kind for each in units)
    return document(width, y - 10, f"Which rank holds what: {named}", body)


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
        """Append the elements, from y downwards; returns where they end."""
        unit = self.unit
        if unit.title:
            body.append(text(MARGIN, y + FONT, cut(unit.title, self.right - MARGIN), "name bold"))
            y += 17
        lines = (", ".join(filter(None, (unit.kind, mesh_line(unit)))), summary_line(unit))
        for line in (part for each in lines for part in wrap(each, int((self.right - MARGIN) / SANS / FONT))):
            body.append(text(MARGIN, y + FONT, line, "soft"))
            y += 17
        y += 9
        count = len(unit.groups)
        left_out = range(MOST_BARS - LAST_BARS, count - LAST_BARS) if count > MOST_BARS else range(0)
        for at in range(count):
            if at in left_out:
                if at == left_out.start:
                    ranks = range(unit.groups[at].start, unit.groups[left_out[-1]].stop)
                    body.append(text(self.left, y + FONT, f"{unit.group_text(ranks)} are not drawn", "soft"))
                    y += FONT + GAP + 4
                continue
            body.extend(self._bar(at, y))
            y += BAR + GAP
        body.extend(self._axis(y - 2))
        y += 36
        height, elements = legend(MARGIN, y, self.right - MARGIN, list(self._legend()))
        body.extend(elements)
        return y + height

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

    def _box(self, row: Row, held: Held, group: range, y: float) -> str:
        unit, what = self.unit, held.text(group)
        size = bytes_text(held.numel * itemsize(unit.layout.dtype))
        where = f"{unit.group_text(group)}, elements {held.start:,}:{held.stop:,} of the shard"
        if row.padding:
            kind = f"hatch-{row.padding}"
            about = f"{row.padding} padding: {held.numel:,} elements filled with {row.fill} ({size})\n{where}"
        else:
            kind, param = fill_of(row.i), unit.layout.params[row.i]
            about = f"{one_line(param.name)} {param.shape}: {what}, {held.numel:,} elements ({size})\n{where}"
        return rect(self._x(held.start), y, held.numel * self.scale, BAR, kind, about)

    def _words(self, row: Row, held: Held, group: range, y: float) -> Iterator[str]:
        """The longest label that fits into its box."""
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
        for i, label in enumerate(unit.labels):
            yield fill_of(i), f"{label} {unit.layout.params[i].shape}"
        paddings = dict.fromkeys((row.padding, row.fill) for row in unit.rows if row.padding)
        for kind, fill in paddings:
            yield f"hatch-{kind}", f"{kind} padding, filled with {fill}"
