"""The report in a few lines of a terminal."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments.report import words
from experiments.report.build import PairSeries

_STYLES = {"equal": "green", "rounding": "green", "bug": "bold red", "inconclusive": "yellow", "incomparable": "yellow"}
_ROWS = 4
_NAMES = 3


def print_report(console: Console, report: dict[str, Any], series: Sequence[PairSeries]) -> None:
    """Print the verdict in a sentence, a table of pairs, the trace and the zero-gradient parameters.

    Of more than four pairs the first four are shown, those with the report's verdict first.
    """
    console.print(Text(words.headline(report), style=_STYLES[report["verdict"]]))
    both = list(zip(report["pairs"], (words.limits(one.bounds) for one in series), strict=True))
    both.sort(key=lambda row: row[0]["verdict"] != report["verdict"])
    pairs = [pair for pair, _ in both]
    if pairs:
        console.print(_table(both[:_ROWS]))
    if len(pairs) > _ROWS:
        console.print(Text(f"… and {len(pairs) - _ROWS} more pairs, in report.json"))
    if (trace := report["trace"]) is not None:
        counts = ", ".join(f"{entry['count']} {kind}" for kind, entry in trace["plan"].items() if entry["count"])
        verdict = "as planned" if trace["equal"] else "NOT as planned; the plan"
        console.print(Text(f"collectives {verdict}: {counts or 'none'} a step"))
    if zero := sorted({name for pair in pairs for name in pair["zero_gradient_parameters"]}):
        named = ", ".join(zero[:_NAMES]) + (f" and {len(zero) - _NAMES} more" if len(zero) > _NAMES else "")
        console.print(Text(f"not counted, their gradient is zero but for rounding: {named}"))


def _table(rows: list[tuple[dict[str, Any], tuple[str, str]]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("dtype", "ranks", "steps", "verdict", "loss diff.", "bound", "param. diff.", "bound"):
        table.add_column(heading, no_wrap=True, overflow="ellipsis", justify="left" if heading == "dtype" else "right")
    for pair, limits in rows:
        worlds = pair["world_size"]
        table.add_row(
            pair["dtype"],
            str(worlds) if isinstance(worlds, int) else "/".join(map(str, worlds)),
            str(pair["steps"]),
            Text(pair["verdict"], style=_STYLES[pair["verdict"]]),
            words.number(pair["max_relative_loss_difference"]),
            limits[0].removeprefix("bound "),
            words.number(pair["max_relative_parameter_difference"]),
            limits[1].removeprefix("bound "),
        )
    return table
