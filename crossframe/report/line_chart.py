"""Line charts as inline SVG. The style sheet of the page sets the colours, for light and dark."""

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
# Numbers beyond this are drawn as infinite, as matplotlib cannot reckon with them.
_LARGEST = 1e300
_TICKS = 5
# What matplotlib draws with, and the variable of the style sheet that takes its place.
_COLOURS = {
    "first": "#1f6fd0", "second": "#c8560c", "curve2": "#1a7f3d", "curve3": "#7d3c98", "curve4": "#007a87",
    "curve5": "#a3186f", "curve6": "#6b5c00", "curve7": "#4a4f9c", "curve8": "#8a4b2a", "bad": "#c3261f",
    "soft": "#5b6570", "line": "#dfe3e8",
}  # fmt: skip
STYLES = ("first", "second", *(f"curve{i}" for i in range(2, 9)))
"""The styles of curves."""
_MARKERS = dict(zip(STYLES, ("o", "s", "^", "D", "v", "P", "X", "*", "<"), strict=True))
GLYPHS = dict(zip(STYLES, "●■▲◆▼✚✖★◀", strict=True))
"""The markers of the styles as text."""
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
    """One curve. `style` is one of STYLES; `dashed` lets what lies beneath shine through; a strong one is drawn on top."""

    label: str
    points: tuple[tuple[int, float], ...]
    style: str
    dashed: bool = False
    strong: bool = False


@dataclass(frozen=True)
class Limit:
    """A horizontal line at a bound, in the colour of a curve or "bad"; its label stands above it or below."""

    label: str
    value: float
    style: str
    above: bool


def line_chart(
    lines: Sequence[Line], *, name: str, about: str, y_label: str, limits: Sequence[Limit] = (), log: bool = False
) -> Markup:
    """A chart over steps.

    Args:
        name: no other chart of the page has it; the ids inside the chart derive from it.
        about: what it shows, for those who do not see it.
        log: logarithmic in y, at the lower edge 0, and if there is any infinity, that at the upper edge.
        limits: horizontal lines; they are always inside the chart.

    Values that are not a number interrupt a line, and without `log` also infinities do.
    """
    # Imported when a page is written: this is slow, and the command line is to start at once.
    from matplotlib import style
    from matplotlib.figure import Figure

    text = StringIO()
    with style.context(["default", _STYLE | {"svg.hashsalt": name}]):
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72))
        axes = figure.subplots()
        top = _logarithmic(axes, lines, limits) if log else math.nan
        _draw(axes, lines, limits, top)
        figure.savefig(text, format="svg", transparent=True)
    # The page has a head of its own for a chart, and a font. The ids of groups are the same in every chart.
    body = re.sub(r'(?<=<g) id="[^"]*"| font-family: [^;"]*;', "", text.getvalue().partition("</defs>")[2])
    for variable, colour in _COLOURS.items():
        body = body.replace(colour, f"var(--{variable})")
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{escape(y_label)} over steps</title><desc id="{name}-desc">{escape(about)}</desc>{body}'
    )


def _draw(axes: "Axes", lines: Sequence[Line], limits: Sequence[Limit], top: float) -> None:
    for line in lines:
        values = [top if value > _LARGEST else value for _, value in line.points]
        few = len(line.points) <= _MARKED
        axes.plot(
            [step for step, _ in line.points],
            [value if abs(value) <= _LARGEST else math.nan for value in values],
            color=_COLOURS[line.style],
            linestyle="dashed" if line.dashed else "solid",
            linewidth=2.6 if line.strong else 1.5,
            marker=_MARKERS[line.style] if few or len(lines) > 2 else "",
            markevery=1 if few else math.ceil(len(line.points) / _MARKED),
            zorder=4 if line.strong else 3,
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
    if math.isnan(top):
        axes.locator_params(axis="y", nbins=_TICKS)


def _logarithmic(axes: "Axes", lines: Sequence[Line], limits: Sequence[Limit]) -> float:
    """Between the decades around all that is drawn, and one more on top; below them is room for 0, on the lower edge. Returns
    where an infinity is drawn: on the upper edge, with room below it."""
    values = [value for line in lines for _, value in line.points] + [limit.value for limit in limits]
    exponents = [math.log10(max(value, 1 / _LARGEST)) for value in values if 0 < value <= _LARGEST] or [0.0]
    low, high = math.floor(min(exponents)), math.ceil(max(exponents)) + 1
    stride = math.ceil((high - low) / _TICKS)
    ticks = [*range(low, high + 1, stride)]
    labels = ["0", *(f"1e{tick:+03d}" for tick in ticks)]
    if any(value > _LARGEST for value in values):
        high = ticks[-1] + stride
        ticks, labels = [*ticks, high], [*labels, "∞"]
    axes.set_yscale("symlog", linthresh=10.0**low, linscale=stride)
    axes.set_ylim(0, 10.0**high)
    axes.set_yticks([0, *(10.0**tick for tick in ticks)], labels=labels)
    axes.set_yticks([], minor=True)
    return 10.0**high
