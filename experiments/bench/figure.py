"""A figure of a benchmark: the median and quartiles of its measurements, shown in a line with its limit."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.segment import Segments
from rich.table import Table

COLUMNS = ("what", "figure", "limit", "")
TIMES = "times"


@dataclass(frozen=True)
class Figure:
    """One measurement.

    Attributes:
        what: that was measured, in words.
        value: in `unit`.
        unit: for instance "ms", or "times" what `what` says.
        limit: what it has to stay within; None: it is reported alone.
        low, high: the quartiles of the repetitions whose median `value` is; None where it was counted once.
    """

    what: str
    value: float
    unit: str
    limit: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def ok(self) -> bool:
        """Whether it is within its limit.

        >>> Figure("a", 1.5, "loops", 1.0).ok, Figure("a", 1.5, "loops").ok
        (False, True)
        """
        return self.limit is None or self.value <= self.limit

    def as_json(self) -> dict[str, Any]:
        """All of it, for a file."""
        return {**self.__dict__, "ok": self.ok}


def median_figure(what: str, values: Sequence[float], unit: str, limit: float | None = None) -> Figure:
    """The median of at least two repetitions, between their quartiles.

    >>> median_figure("work", [1.0, 4.0, 2.0], "ms")
    Figure(what='work', value=2.0, unit='ms', limit=None, low=1.5, high=3.0)
    """
    low, value, high = quantiles(values, n=4, method="inclusive")
    return Figure(what, value, unit, limit, low, high)


@dataclass(frozen=True)
class Grid:
    """Bytes by row and column, beside the bytes of the model.

    Attributes:
        columns: what each number of a row is of.
        rows: the name of each row to its numbers, as many as there are columns.
        whole: bytes of the model, of which each number is given as a multiple too.
    """

    columns: tuple[str, ...]
    rows: dict[str, tuple[int, ...]]
    whole: int

    def lines(self) -> list[tuple[str, ...]]:
        """What a table says, with its head first.

        >>> Grid(("zeros", "casts"), {"ours": (0, 3_000_000)}, 2_000_000).lines()
        [('', 'zeros', 'casts'), ('ours', '0', '3.000 MB = 1.500')]
        """
        head = ("", *self.columns)
        return [head, *((name, *map(self._cell, numbers)) for name, numbers in self.rows.items())]

    def _cell(self, num_bytes: int) -> str:
        return f"{_number(num_bytes / 1e6)} MB = {num_bytes / self.whole:.3f}" if num_bytes else "0"


@dataclass(frozen=True)
class Section:
    """Figures that were measured in one way.

    Attributes:
        title: in a few words.
        how: what was measured and on what, in sentences.
        figures: none where the section was skipped.
        skipped: why it was, or "".
        grid: what was counted, where that is more than single figures.
    """

    title: str
    how: str
    figures: tuple[Figure, ...] = ()
    skipped: str = ""
    grid: Grid | None = None

    @property
    def ok(self) -> bool:
        """Whether every figure is within its limit."""
        return all(figure.ok for figure in self.figures)

    def as_json(self) -> dict[str, Any]:
        """All of it, for a file."""
        grid = None if self.grid is None else self.grid.__dict__
        return {
            **self.__dict__,
            "figures": [figure.as_json() for figure in self.figures],
            "grid": grid,
            "ok": self.ok,
        }


def rows(figures: Sequence[Figure]) -> list[tuple[str, str, str, str]]:
    """What the table says of each figure.

    >>> rows([Figure("work", 2.5, "loops", 2.0), Figure("play", 1250.0, "ms", None, 1100.0, 1300.04)])
    [('work', '2.500 loops', '2', 'over'), ('play', '1,250.0 ms (1,100.0 to 1,300.0)', '', '')]
    """
    return [
        (
            figure.what,
            f"{_number(figure.value)} {figure.unit}"
            + ("" if figure.low is None or figure.high is None else f" ({_number(figure.low)} to {_number(figure.high)})"),
            "" if figure.limit is None else f"{figure.limit:g}",
            "" if figure.limit is None else "ok" if figure.ok else "over",
        )
        for figure in figures
    ]  # fmt: skip


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"


def print_table(console: Console, figures: Sequence[Figure]) -> None:
    """The figures as a table; those over their limits in red."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        table.add_column(column, justify="right" if column in ("figure", "limit") else "left", no_wrap=True)
    for figure, row in zip(figures, rows(figures), strict=True):
        table.add_row(*row, style=None if figure.ok else "red")
    _print(console, table)


def print_grid(console: Console, grid: Grid) -> None:
    """The numbers as a table."""
    head, *lines = grid.lines()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(head):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    _print(console, table)


def _print(console: Console, table: Table) -> None:
    # Wider than the screen if it must be: a figure that is cut off says nothing.
    width = Measurement.get(console, console.options.update(max_width=250), table).maximum
    console.print(Segments(console.render(table, console.options.update_width(width))), soft_wrap=True, end="")


def markdown_table(figures: Sequence[Figure]) -> list[str]:
    """The lines of the figures as a Markdown table.

    >>> print(*markdown_table([Figure("work", 2.5, "loops", 2.0)]), sep="\\n")
    | what | figure | limit |  |
    |---|--:|--:|---|
    | work | 2.500 loops | 2 | over |
    """
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|--:|--:|---|"]
    return lines + [f"| {' | '.join(row)} |" for row in rows(figures)]


def markdown_grid(grid: Grid) -> list[str]:
    """The lines of the numbers as a Markdown table."""
    head, *lines = (f"| {' | '.join(line)} |" for line in grid.lines())
    return [head, "|---|" + "--:|" * len(grid.columns), *lines]
