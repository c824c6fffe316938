"""The `crossframe bench` command: measure, print a table, write it to a file, say how it ended."""

import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from experiments.bench.core import Figure, core_figures, loop_seconds

COLUMNS = ("what", "figure", "limit", "")


def run_core_bench(console: Console, output: Path | None = None) -> int:
    """Time the core: layouts, pieces, plans and their cost for llama-3-405b at up to 16,384 ranks, and its import.

    Args:
        output: a Markdown file to write the figures to as well.

    Returns:
        The exit status: 0 if every figure is within its limit, 1 if one is not.
    """
    figures = []
    with console.status("measuring") as status:
        for figure in core_figures():
            figures.append(figure)
            status.update(f"measured {figure.what}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        table.add_column(column, justify="right" if column in ("figure", "limit") else "left", no_wrap=True)
    for figure, row in zip(figures, rows(figures), strict=True):
        table.add_row(*row, style=None if figure.ok else "red")
    console.print(table, soft_wrap=False)
    console.print(f"\n{machine()}", highlight=False)
    if output is not None:
        output.write_text(markdown(figures))
        console.print(f"figures: {output}", highlight=False)
    return 0 if all(figure.ok for figure in figures) else 1


def rows(figures: Sequence[Figure]) -> list[tuple[str, str, str, str]]:
    """What the table says of each figure.

    >>> rows([Figure("work", 2.5, "loops", 2.0)])
    [('work', '2.500 loops', '2', 'over')]
    """
    return [
        (
            figure.what,
            f"{figure.value:.3f} {figure.unit}",
            "" if figure.limit is None else f"{figure.limit:g}",
            "" if figure.limit is None else "ok" if figure.ok else "over",
        )
        for figure in figures
    ]


def machine() -> str:
    """What the figures were measured on, in one line."""
    return (
        f"one loop of a million additions takes {loop_seconds() * 1e3:.0f} ms here; {os.cpu_count()} {platform.machine()} "
        f"cores, load {os.getloadavg()[0]:.1f}, {platform.system()}, Python {platform.python_version()}, "
        f"numpy {version('numpy')}, ml_dtypes {version('ml_dtypes')}"
    )


def markdown(figures: Sequence[Figure]) -> str:
    """The figures as a Markdown table with the machine above it."""
    lines = ["# The core", "", f"`{' '.join(['crossframe', *sys.argv[1:]])}`: {machine()}.", ""]
    lines += [f"| {' | '.join(COLUMNS)} |", "|---|--:|--:|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows(figures)]
    return "\n".join(lines) + "\n"
