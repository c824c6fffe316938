"""Line charts as inline SVG: colours come from the page's style sheet, so that light and dark both fit."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import TYPE_CHECKING

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A phone shows a chart a little smaller than this many pixels, a desktop a little larger.
WIDTH, HEIGHT = 420, 250
_MARKED = 15
_TICKS = 5
# What matplotlib draws with, and the variable of the style sheet that takes its place.
_COLOURS = {"first": "#1f6fd0", "second": "#c8560c", "soft": "#5b6570", "line": "#dfe3e8"}
_STYLE = {
    "svg.fonttype": "none",
    "font.size": 12,
    "figure.constrained_layout.use": True,
    "axes.axisbelow": True,
    "grid.color": _COLOURS["line"],
    "lines.markersize": 5,
    "lines.dashed_pattern": (5, 4),
    **{f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")},
    **dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color"), _COLOURS["soft"]),
    **{f"{axis}tick.major.size": 0 for axis in "xy"},
    "xtick.major.pad": 9,
}


@dataclass(frozen=True)
class Line:
    """One curve. `style` is a colour of the style sheet ("first", "second"); `dashed` lets what lies beneath shine through."""

    label: str
    points: tuple[tuple[int, float], ...]
    style: str
    dashed: bool = False


@dataclass(frozen=True)
class Limit:
    """A horizontal line at a bound; its label stands above it or below."""

    label: str
    value: float
    style: str
    above: bool


def line_chart(
    lines: Sequence[Line], *, name: str, y_label: str, limits: Sequence[Limit] = (), log: bool = False
) -> Markup:
    """A chart over steps.

    Args:
        name: no other chart of the page has it; the ids inside the chart derive from it.
        log: logarithmic in y, and at the lower edge 0.
        limits: horizontal lines; they are always inside the chart.

    Values that are not finite interrupt a line.
    """
    # Imported when a page is written: this is slow, and the command line is to start at once.
    from matplotlib import style
    from matplotlib.figure import Figure

    text = StringIO()
    with style.context(["default", _STYLE | {"svg.hashsalt": name}]):
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72))
        axes = figure.subplots()
        _draw(axes, lines, limits)
        if log:
            _logarithmic(
                axes, [value for line in lines for _, value in line.points] + [limit.value for limit in limits]
            )
        figure.savefig(text, format="svg", transparent=True)
    # The page has a head of its own for a chart, and a font. The ids of groups are the same in every chart.
    body = re.sub(r'(?<=<g) id="[^"]*"| font-family: [^;"]*;', "", text.getvalue().partition("</defs>")[2])
    for variable, colour in _COLOURS.items():
        body = body.replace(colour, f"var(--{variable})")
    about = escape(f"{y_label} over steps: {', '.join(line.label for line in lines)}")
    return Markup(f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{about}">{body}')


def _draw(axes: "Axes", lines: Sequence[Line], limits: Sequence[Limit]) -> None:
    for line in lines:
        axes.plot(
            [step for step, _ in line.points],
            [value if math.isfinite(value) else math.nan for _, value in line.points],
            color=_COLOURS[line.style],
            linestyle="dashed" if line.dashed else "solid",
            marker="o" if len(line.points) <= _MARKED else "",
            clip_on=False,
        )
    for limit in limits:
        axes.axhline(limit.value, color=_COLOURS[limit.style], linestyle="dotted", clip_on=False)
        axes.annotate(
            limit.label,
            (1, limit.value),
            xycoords=("axes fraction", "data"),
            xytext=(0, 4 if limit.above else -4),
            textcoords="offset points",
            color=_COLOURS[limit.style],
            horizontalalignment="right",
            verticalalignment="bottom" if limit.above else "top",
        )
    axes.grid(axis="y", clip_on=False)
    steps = [step for line in lines for step, _ in line.points] or [0]
    axes.set_xlim(min(steps), max(max(steps), min(steps) + 1))
    axes.set_xlabel("step")
    axes.locator_params(axis="x", nbins=6, integer=True)
    axes.locator_params(axis="y", nbins=_TICKS)


def _logarithmic(axes: "Axes", values: Sequence[float]) -> None:
    """Between the decades around all that is drawn, and one more on top; below them is room for 0, on the lower edge."""
    exponents = [math.log10(value) for value in values if 0 < value < math.inf] or [0.0]
    low, high = math.floor(min(exponents)), math.ceil(max(exponents)) + 1
    stride = math.ceil((high - low) / _TICKS)
    axes.set_yscale("symlog", linthresh=10.0**low, linscale=stride)
    axes.set_ylim(0, 10.0**high)
    ticks = range(low, high + 1, stride)
    axes.set_yticks([0, *(10.0**tick for tick in ticks)], labels=["0", *(f"1e{tick:+03d}" for tick in ticks)])
    axes.set_yticks([], minor=True)
