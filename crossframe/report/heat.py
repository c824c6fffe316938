"""The heat map of units and steps in a report, as inline SVG whose columns scale with the width; report.css has its colors."""

from html import escape
from itertools import takewhile

from markupsafe import Markup

from crossframe.draw.amounts import count_ticks
from crossframe.report import sentences
from crossframe.report.tables_and_curves import HeatMap, Worst, level

ROW = 17
"""Height of a row in pixels, equal to that in the style sheet."""
_LABELS = 6
_LONG = 16
LEVELS = {
    "in0": "equal bits", "in1": "up to 0.01", "in2": "up to 0.1", "in3": "up to 1", "free": "differs, no bound is known",
    "out1": "up to 10 times", "out2": "up to 1000 times", "out3": "up to a million times", "out4": "over a million times",
}  # fmt: skip
"""The classes of cells and their texts in the legend."""


def row_names(heat: HeatMap) -> list[tuple[str, str]]:
    """(label without the common prefix, all units) of each row."""
    skip = len(common_beginning(heat))
    short = [tuple(unit[skip:] for unit in row) for row in heat.rows]
    return [
        (group_name(s), ", ".join(sentences.unit_name(unit) for unit in row))
        for s, row in zip(short, heat.rows, strict=True)
    ]


def common_beginning(heat: HeatMap) -> str:
    """The common prefix of all units but the root, in whole parts of names; "" if names are short."""
    units = [unit for row in heat.rows for unit in row if unit]
    if len(units) < 2 or max(map(len, units)) <= _LONG:
        return ""
    # What the first and the last in alphabetical order share, all share.
    ends = zip(min(units).split(".")[:-1], max(units).split(".")[:-1], strict=False)
    return "".join(f"{part}." for part, other in takewhile(lambda both: both[0] == both[1], ends))


def group_name(units: tuple[str, ...]) -> str:
    """A unit, or the first and the last of several.

    >>> group_name(("",)), group_name(("h.0", "h.1", "h.2"))
    ('(root)', 'h.0 … h.2')
    """
    first, last = sentences.unit_name(units[0]), sentences.unit_name(units[-1])
    return first if len(units) == 1 else f"{first} … {last}"


def step_names(heat: HeatMap) -> list[tuple[float, str]]:
    """(percent from the left, step) of evenly spaced columns, starting with the first."""
    count = len(heat.columns)
    return [((at + 0.5) * 100 / count, str(heat.columns[at][0])) for at, _ in count_ticks(count - 1, _LABELS)]


def heat_levels(heat: HeatMap) -> list[tuple[str, str]]:
    """(class, text) of the kinds of cells in the map, in order."""
    there = {level(worst) for worst in heat.cells.values()}
    return [(kind, meaning) for kind, meaning in LEVELS.items() if kind in there]


def heat_chart(heat: HeatMap, *, name: str, about: str) -> Markup:
    """The cells. `row_names` and `step_names` label them.

    Args:
        name: no other chart of the page has it.
        about: what it shows, for those who do not see it.
    """
    wide = 100 / max(1, len(heat.columns))
    cells = "".join(
        f'<rect x="{column * wide:.3f}%" y="{row * ROW}" width="{wide:.3f}%" height="{ROW}" class="{level(worst)}">'
        f"<title>{escape(_tip(heat, row, column, worst))}</title></rect>"
        for (row, column), worst in sorted(heat.cells.items())
    )
    if heat.first is not None:
        row, column = heat.first
        box = f'x="{column * wide:.3f}%" y="{row * ROW}" width="{wide:.3f}%" height="{ROW}"'
        # Two frames, one dark and one light, so that it is seen on any cell.
        cells += f'<rect {box} class="around"/><rect {box} class="decisive"/>'
    return Markup(
        f'<svg class="heat" width="100%" height="{max(1, len(heat.rows)) * ROW}" role="img" '
        f'aria-labelledby="{name}-title {name}-desc"><title id="{name}-title">Units over steps</title>'
        f'<desc id="{name}-desc">{escape(about)}</desc>{cells}</svg>'
    )


def _tip(heat: HeatMap, row: int, column: int, worst: Worst) -> str:
    steps = heat.columns[column]
    at = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    text = f"{sentences.short(group_name(heat.rows[row]))}, {at}: {sentences.worst_of(worst)}"
    return f"{text} ({sentences.short(worst.name)})" if worst.name else text
