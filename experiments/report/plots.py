"""Line charts as inline SVG: colours come from the page's style sheet, so that light and dark both fit."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

WIDTH, HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 40
_MARKED = 15
_HOVERED = 300


@dataclass(frozen=True)
class Line:
    """One curve. `style` is a class of the style sheet ("first", "second"); `dashed` lets what lies beneath shine through."""

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


@dataclass(frozen=True)
class _Axes:
    x_low: float
    x_high: float
    y_low: float
    y_high: float
    log: bool

    def x(self, step: float) -> float:
        return LEFT + (step - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        at = math.log10(max(value, 10.0**self.y_low)) if self.log else value
        return HEIGHT - BOTTOM - (at - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)


def line_chart(lines: Sequence[Line], *, y_label: str, limits: Sequence[Limit] = (), log: bool = False) -> Markup:
    """A chart over steps.

    Args:
        log: logarithmic in y. A value of 0 is then drawn on the lower edge.
        limits: horizontal lines; they are always inside the chart.

    Values that are not finite interrupt a line.
    """
    axes = _axes(lines, limits, log)
    parts = [*_grid(axes), *(_limit(limit, axes) for limit in limits)]
    for line in lines:
        parts.append(_curve(line, axes))
    names = ", ".join(line.label for line in lines)
    return Markup(
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(f"{y_label} over steps: {names}")}">'
        f'{"".join(parts)}<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}" '
        f'text-anchor="middle">step</text></svg>'
    )


def _axes(lines: Sequence[Line], limits: Sequence[Limit], log: bool) -> _Axes:
    steps = [step for line in lines for step, _ in line.points] or [0]
    values = [value for line in lines for _, value in line.points if math.isfinite(value)]
    if log:
        exponents = [math.log10(value) for value in [*values, *(limit.value for limit in limits)] if value > 0] or [0.0]
        low, high = math.floor(min(exponents)), math.ceil(max(exponents))
        # A decade of air above the bound and below the noise: neither touches an edge.
        return _Axes(min(steps), max(max(steps), min(steps) + 1), low - 1, high + 1, True)
    low, high = min(values, default=0.0), max(values, default=1.0)
    air = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return _Axes(min(steps), max(max(steps), min(steps) + 1), low - air, high + air, False)


def _grid(axes: _Axes) -> list[str]:
    parts = []
    for value in _ticks(axes.y_low, axes.y_high, 5, whole=axes.log):
        y = axes.y(10.0**value if axes.log else value)
        text = _exponent(round(value)) if axes.log else f"{value:g}"
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
        )
    for step in _ticks(axes.x_low, axes.x_high, 6, whole=True):
        parts.append(
            f'<text class="tick" x="{axes.x(step):.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{step:.0f}</text>'
        )
    return parts


def _exponent(power: int) -> str:
    return f'10<tspan class="power" dy="-5">{power}</tspan>'.replace(">-", ">&minus;")


def _ticks(low: float, high: float, at_most: int, *, whole: bool) -> list[float]:
    """Round numbers inside a range: multiples of 1, 2 or 5 times a power of ten."""
    size = 10.0 ** math.floor(math.log10((high - low) / at_most))
    size = next(size * k for k in (1, 2, 5, 10, 20) if (high - low) / (size * k) <= at_most)
    if whole:
        size = max(1.0, round(size))
    first, count = math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9)
    return [round(i * size, 12) for i in range(first, count + 1)]


def _limit(limit: Limit, axes: _Axes) -> str:
    y = axes.y(limit.value)
    return (
        f'<line class="limit {limit.style}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="note {limit.style}" x="{WIDTH - RIGHT}" y="{y + (-5 if limit.above else 15):.1f}" text-anchor="end">'
        f"{escape(limit.label)}</text>"
    )


def _curve(line: Line, axes: _Axes) -> str:
    path, begun = [], False
    for step, value in line.points:
        if math.isfinite(value):
            path.append(f"{'L' if begun else 'M'}{axes.x(step):.1f},{axes.y(value):.1f}")
        begun = math.isfinite(value)
    # Many dots would hide the curve beneath: they are then there for the pointer alone.
    hidden = " hover" if len(line.points) > _MARKED else ""
    dots = [
        f'<circle class="{line.style}{hidden}" cx="{axes.x(step):.1f}" cy="{axes.y(value):.1f}" r="3.5">'
        f"<title>{escape(line.label)}, step {step}: {value:.6g}</title></circle>"
        for step, value in line.points
        if math.isfinite(value) and len(line.points) <= _HOVERED
    ]
    dash = " dashed" if line.dashed else ""
    return f'<path class="curve {line.style}{dash}" d="{"".join(path)}"/>{"".join(dots)}'
