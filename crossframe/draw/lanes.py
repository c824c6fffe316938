"""Draws the timeline and the memory of a step as an SVG: lanes of bars to scale, and stacked areas below them."""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby

from crossframe.cost import PASSING, Cost
from crossframe.draw.amounts import bytes_text, bytes_ticks, seconds_text, seconds_ticks
from crossframe.draw.steps import (
    WAITING,
    WORDS,
    Bar,
    check_cost,
    lanes,
    phases,
    rank_of,
    sampled,
    step_seconds,
)
from crossframe.draw.svg import SANS, cut, document, fits, legend, number, path, rect, text
from crossframe.draw.timeline import moment_text
from crossframe.trace import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER

MARGIN, LEFT, BAR, GAP, AREA = 14, 112, 26, 6, 150
# Minimum width of a bar, so that very short ones are visible.
THINNEST = 0.5
# Lanes with more bars than this are drawn pixel by pixel.
MOST_BARS = 1500
FILLS = {"forward": 0, "backward": 1, ALL_GATHER: 2, REDUCE_SCATTER: 3, ALL_REDUCE: 5}
# Memory that is held throughout at the bottom, and PASSING above it.
MEMORY_FILLS = dict(zip(("shards", "optimizer", *PASSING), (6, 7, 8, 9, 4, 10, 11, 12), strict=True))


def plan_svg(cost: Cost, *, title: str = "", width: int = 860) -> str:
    """An SVG of a step: lanes for compute and for each group of ranks that communicates, and memory by purpose below.

    Args:
        cost: from `crossframe.cost.step_cost`.
        title: title above the drawing.
        width: width of the drawing in pixels.

    Raises:
        PlanError: `cost` is not a Cost, or has no events.
    """
    check_cost(cost)
    return _Drawing(cost, width).draw(title)


class _Drawing:
    def __init__(self, cost: Cost, width: int) -> None:
        self.cost, self.width, self.right = cost, width, width - MARGIN
        self.seconds = step_seconds(cost)
        self.scale = (self.right - LEFT) / self.seconds if self.seconds else 0.0

    def draw(self, title: str) -> str:
        body: list[str] = []
        rank, room = rank_of(self.cost), self.right - MARGIN
        about = f"A step of rank {rank:,}: {title}" if title else f"A step of rank {rank:,}"
        body.append(text(MARGIN, MARGIN + 12, cut(about, room), "bold"))
        body.append(text(MARGIN, MARGIN + 29, self._headline(), "soft"))
        y = MARGIN + 44.0
        found = lanes(self.cost)
        bottom = y + 18 + len(found) * (BAR + GAP) + 22 + AREA
        body.extend(self._phases(y, bottom))
        y += 18
        for name, bars in found.items():
            body.append(text(LEFT - 10, y + BAR / 2 + 4, name, "end soft"))
            body.append(rect(LEFT, y, self.right - LEFT, BAR, "panel"))
            if len(bars) > MOST_BARS:
                body.extend(self._sampled(bars, y))
            else:
                body.extend(self._bar(bar, y) for bar in bars)
                body.extend(self._names(bars, y))
            y += BAR + GAP
        y += 22
        assert y + AREA == bottom
        body.extend(self._memory(y))
        y = bottom + 40
        used = dict.fromkeys(bar.kind for bars in found.values() for bar in bars)
        entries = [(_class(kind), WORDS[kind]) for kind in WORDS if kind in used]
        height, elements = legend(LEFT, y, self.right - LEFT, entries)
        body.append(text(LEFT - 10, y + 10.5, "lanes", "end soft"))
        body.extend(elements)
        y += height + 4
        entries = [(f"fill{fill}", f"{name} {bytes_text(most)}") for name, fill, most in self._purposes]
        height, elements = legend(LEFT, y, self.right - LEFT, entries)
        body.append(text(LEFT - 10, y + 10.5, "at most", "end soft"))
        body.extend(elements)
        return document(self.width, y + height + 6, about, body)

    def _headline(self) -> str:
        cost = self.cost
        return (
            f"{seconds_text(cost.seconds)}, of them {seconds_text(cost.exposed_seconds)} waiting for communication; peak "
            f"memory {bytes_text(cost.peak_bytes)}"
        )

    def _x(self, seconds: float) -> float:
        return LEFT + seconds * self.scale

    def _phases(self, y: float, bottom: float) -> Iterator[str]:
        """Lines at the beginnings of forwards and backwards, with names if there is room."""
        found = phases(self.cost)
        for phase in found:
            if len(found) * 4 < self.right - LEFT:
                yield path(f"M{number(self._x(phase.start))} {number(y)}V{number(bottom)}", "grid")
            room = self._x(phase.stop) - self._x(phase.start)
            number_text = f" {phase.microbatch}" if len(found) > 2 else ""
            for words in (f"{phase.name}{number_text}", f"{phase.name[0].upper()}{number_text}"):
                if fits(words, room, SANS):
                    yield text(self._x(phase.start) + 4, y + 11, words, "soft")
                    break

    def _bar(self, bar: Bar, y: float) -> str:
        width = max(THINNEST, (bar.stop - bar.start) * self.scale)
        thin = " thin" if width < 3 and bar.kind != WAITING else ""
        return rect(self._x(bar.start), y, width, BAR, _class(bar.kind) + thin, bar.about)

    def _sampled(self, bars: Sequence[Bar], y: float) -> Iterator[str]:
        """A lane with too many bars to distinguish: each pixel shows one kind, in proportion to time."""
        at, num_pixels = 0, int(self.right - LEFT)
        pixel = (self.right - LEFT) / num_pixels
        for kind, run in groupby(sampled(bars, self.seconds, num_pixels)):
            until = at + len(list(run))
            if kind:
                about = f"{WORDS[kind]}: one of {len(bars):,} bars, which are too many to tell apart"
                yield rect(
                    LEFT + at * pixel,
                    y,
                    (until - at) * pixel,
                    BAR,
                    f"{_class(kind)} thin" if kind != WAITING else _class(kind),
                    about,
                )
            at = until

    def _names(self, bars: Sequence[Bar], y: float) -> Iterator[str]:
        """The names of units, or the ends of these names, on bars that have room for them."""
        for bar in bars:
            candidates = (bar.unit, bar.unit.rpartition(".")[2])
            words = next((words for words in candidates if fits(words, (bar.stop - bar.start) * self.scale)), "")
            if words:
                yield text(self._x((bar.start + bar.stop) / 2), y + BAR / 2 + 4, words, "name middle")

    @cached_property
    def _purposes(self) -> list[tuple[str, int, int]]:
        """The purposes of memory, each with its fill and its maximum."""
        most: dict[str, int] = {}
        for span in self.cost.spans:
            for purpose, held in span.memory.items():
                most[purpose] = max(most.get(purpose, 0), held)
        return [(purpose, fill, most[purpose]) for purpose, fill in MEMORY_FILLS.items() if most[purpose]]

    def _memory(self, y: float) -> Iterator[str]:
        peak, bottom = self.cost.peak_bytes, y + AREA
        # Leave room for the text about the peak.
        scale = (AREA - 22) / max(1, peak)
        for at, label in bytes_ticks(peak):
            level = bottom - at * scale
            yield path(f"M{LEFT} {number(level)}H{self.right}", "grid")
            yield text(LEFT - 10, level + 4, label, "end soft")
        steps = self._steps()
        below = [0] * len(steps)
        for purpose, fill, most in self._purposes:
            above = [b + memory[purpose] for b, (_, _, memory) in zip(below, steps, strict=True)]
            points = [*_outline(steps, above), *reversed(_outline(steps, below))]
            d = "M" + "L".join(f"{number(x)} {number(bottom - level * scale)}" for x, level in points) + "Z"
            yield path(d, f"fill{fill} area", f"{purpose}: at most {bytes_text(most)}")
            below = above
        yield from self._peak(bottom - peak * scale)
        marks = ""
        ticks = seconds_ticks(self.seconds)
        for at, label in ticks:
            marks += f"M{number(self._x(at))} {number(bottom)}v4"
            yield text(self._x(at), bottom + 18, label, "soft middle")
        yield path(f"M{LEFT} {number(bottom)}H{self.right}{marks}", "frame")

    def _peak(self, level: float) -> Iterator[str]:
        peak = self.cost.peak
        x = self._x(peak.issue_seconds)
        words = f"peak {bytes_text(peak.memory_bytes)}: {moment_text(self.cost)}"
        yield path(f"M{number(x - 4)} {number(level - 7)}h8l-4 7z", "alarm", words)
        room = self.right - x
        left = room < len(words) * SANS * 12 + 12
        yield text(x - 9 if left else x + 9, level - 4, words, f"alarm{' end' if left else ''}")

    def _steps(self) -> list[tuple[float, float, dict[str, int]]]:
        """Memory as steps from x to x. If it changes within a pixel, the highest and the last value are kept."""
        kept: list[tuple[float, dict[str, int], int]] = []
        column: list[tuple[float, dict[str, int], int]] = []
        for span in self.cost.spans:
            at = span.issue_seconds
            here = (self._x(at), dict(span.memory), span.memory_bytes)
            if column and math.floor(here[0]) != math.floor(column[0][0]):
                kept += _highest_and_last(column)
                column = []
            column.append(here)
        kept += _highest_and_last(column)
        stops = [x for x, _, _ in kept[1:]] + [self.right if self.scale else LEFT]
        return [(x, stop, memory) for (x, memory, _), stop in zip(kept, stops, strict=True)]


def _outline(steps: Sequence[tuple[float, float, dict[str, int]]], levels: Sequence[int]) -> list[tuple[float, int]]:
    return [(x, level) for (start, stop, _), level in zip(steps, levels, strict=True) for x in (start, stop)]


def _highest_and_last(column: list[tuple[float, dict[str, int], int]]) -> list[tuple[float, dict[str, int], int]]:
    highest = max(range(len(column)), key=lambda i: column[i][2])
    return column[highest:] if highest == len(column) - 1 else [column[highest], column[-1]]


def _class(kind: str) -> str:
    return f"hatch-{kind}" if kind == WAITING else f"fill{FILLS[kind]}"
