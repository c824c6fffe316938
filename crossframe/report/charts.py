"""The charts of a report's page: differences by phase, losses, and the heat map, of the pair that determines the verdict."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from crossframe.report import sentences
from crossframe.report.build import PairSeries
from crossframe.report.difference_drawing import Place, place_of
from crossframe.report.heat import common_beginning, heat_chart, heat_levels, row_names, step_names
from crossframe.report.line_chart import STYLES, Limit, Line, line_chart
from crossframe.report.tables_and_curves import HeatMap, Worst, curves, heat_map, phases


@dataclass(frozen=True)
class Drawn:
    """Charts and their labels.

    Attributes:
        place: the elements that are off.
        excess: how much is fraction of the bound, by step.
        excess_lines: its curves, for a legend.
        heat: the same by unit and step; beside it stand (short, long) names of rows, which have the beginning in common,
            (percent from the left, name) of columns, and (class, words) of the kinds of cells.
        phases: (phase in words, the worst of it, whether it is where both part).
        losses, differences: mean losses, and relative differences.
    """

    place: Place | None
    excess: Markup | None
    excess_lines: tuple[Line, ...]
    heat: Markup | None
    rows: list[tuple[str, str]]
    beginning: str
    steps: list[tuple[float, str]]
    levels: list[tuple[str, str]]
    marked: bool
    phases: list[tuple[str, Worst, bool]]
    losses: Markup
    differences: Markup | None


def drawn_of(one: PairSeries) -> Drawn:
    """Draw a pair."""
    judged = one.verdict.judged
    parted = one.verdict.parted.phase if one.verdict.parted else ""
    found, lines = phases(judged), _excess_lines(one, parted)
    heat = heat_map(judged, [unit for unit, _ in one.sharding.units], one.verdict.parted) if judged else None
    return Drawn(
        place=place_of(one.verdict.first_divergence, one.sharding),
        excess=_excess_chart(lines, found) if lines else None,
        excess_lines=lines,
        heat=_heat_chart(heat, found) if heat else None,
        rows=row_names(heat) if heat else [],
        beginning=common_beginning(heat) if heat else "",
        steps=step_names(heat) if heat else [],
        levels=heat_levels(heat) if heat else [],
        marked=heat is not None and heat.first is not None,
        phases=[(sentences.PHASES[phase], worst, phase == parted) for phase, worst in found.items()],
        losses=_loss_chart(one),
        differences=_difference_chart(one),
    )


@dataclass(frozen=True)
class Strip:
    """A range of an activation's elements, in percent of all, and how many they are."""

    left: float
    width: float
    numel: int


def strip_of(one: PairSeries) -> Strip | None:
    """The range of differing elements of an activation; None if the difference is elsewhere."""
    where = one.verdict.first_divergence
    if one.shape is None or where is None or where.start is None or where.stop is None:
        return None
    numel = math.prod(one.shape)
    return Strip(round(100 * where.start / numel, 3), round(100 * (where.stop - where.start) / numel, 3), numel)


def _excess_lines(one: PairSeries, parted: str) -> tuple[Line, ...]:
    # A phase has its style whatever other phases there are: the same in all reports.
    styles = dict(zip(sentences.PHASES, STYLES, strict=True))
    return tuple(
        Line(sentences.PHASES[phase], points, styles[phase], strong=phase == parted)
        for phase, points in curves(one.verdict.judged).items()
    )


def _excess_chart(lines: Sequence[Line], found: dict[str, Worst]) -> Markup:
    about = "; ".join(f"{sentences.PHASES[phase]}: {sentences.worst_of(worst)}" for phase, worst in found.items())
    limit = Limit("", 1.0, "bad", above=True)
    return line_chart(lines, name="excess", about=about, y_label="fraction of the bound", limits=[limit], log=True)


def _heat_chart(heat: HeatMap, found: dict[str, Worst]) -> Markup:
    outside = sum(1 for worst in heat.cells.values() if worst.num_beyond)
    about = f"{len(heat.rows)} rows of units, {len(heat.columns)} columns of steps; {outside} cells are outside"
    if heat.first is not None:
        row, column = heat.first
        about += f", first that of {row_names(heat)[row][0]} at step {heat.columns[column][0]}"
    return heat_chart(heat, name="heat", about=about)


def _loss_chart(one: PairSeries) -> Markup:
    a, b = sentences.display(one.verdict.a), sentences.display(one.verdict.b)
    lines = [
        Line(a, tuple(enumerate(one.losses_a)), "first"),
        Line(b, tuple(enumerate(one.losses_b)), "second", dashed=True),
    ]
    return line_chart(lines, name="losses", about=f"losses of {a} and of {b}", y_label="mean loss over ranks")


def _difference_chart(one: PairSeries) -> Markup | None:
    verdict, bounds = one.verdict, one.bounds
    if not verdict.loss_differences:
        return None
    lines = [
        Line("losses", tuple(enumerate(verdict.loss_differences)), "first"),
        Line("parameters", verdict.parameter_differences, "second"),
    ]
    limits = []
    if bounds is not None and bounds.decisive:
        limits = [
            Limit("bound on losses", bounds.loss, "first", above=False),
            Limit("bound on parameters", bounds.parameter, "second", above=True),
        ]
    about = "relative differences of losses and of parameters"
    return line_chart(lines, name="differences", about=about, y_label="relative difference", limits=limits, log=True)
