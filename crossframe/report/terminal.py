"""Prints a report in the terminal: the verdict, where and why, and the table of pairs, their bounds and differences."""

import textwrap
from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from crossframe.report import sentences
from crossframe.report.build import PairSeries
from crossframe.report.tables_and_curves import Worst

_STYLES = {
    "equal": "green",
    "rounding": "green",
    "bug": "bold red",
    "different computation": "red",
    "inconclusive": "yellow",
    "incomparable": "yellow",
}
MOST_LINES = 9
"""Maximum number of lines, without the path of the page. At least one pair is shown."""
_ROWS = 4
_LEAST_WIDTH = 20


def print_report(console: Console, report: dict[str, Any], series: Sequence[PairSeries]) -> None:
    """Print the verdict, its place and diagnosis, a table of pairs, the collectives and the zero-gradient parameters.

    Of more pairs than there is room for the first are shown, those with the report's verdict first.
    """
    at = sentences.decisive(report)
    lines = partial(_lines, width=console.width if console.is_terminal else None)
    style = _STYLES[report["verdict"]]
    headline = sentences.headline(report, series[at].parted if at is not None else "")
    head = [Text(line, style=style) for line in lines(headline)]
    if at is not None:
        head += [Text(line) for text in _found(report["pairs"][at], series[at]).split("\n") for line in lines(text)]
    tail = [Text(line) for text in _besides(report) for line in lines(text)]
    pairs = sorted(zip(report["pairs"], series, strict=True), key=lambda both: both[0]["verdict"] != report["verdict"])
    # One line is the table's head.
    room = max(1, min(_ROWS, MOST_LINES - len(head) - len(tail) - 1))
    shown, hidden = (pairs, []) if len(pairs) <= room else (pairs[: room - 1], pairs[room - 1 :])
    for line in head:
        console.print(line, soft_wrap=True)
    if shown:
        console.print(_table(shown))
    if hidden:
        more = (
            f"{'… and ' if shown else ''}{len(hidden)} {'more ' if shown else ''}pair{'s' if len(hidden) > 1 else ''}"
        )
        tail = [
            Text(line) for line in lines(f"{more}, in report.json: {sentences.counted(pair for pair, _ in hidden)}")
        ] + tail
    for line in tail:
        console.print(line, soft_wrap=True)


def _lines(text: str, width: int | None) -> list[str]:
    """A sentence, wrapped. With width None, for programs, it is one line. Nothing is cut off, since advice comes last."""
    if width is None or not text:
        return [text] if text else []
    return textwrap.wrap(text, max(width, _LEAST_WIDTH), break_long_words=False, break_on_hyphens=False)


def _found(pair: dict[str, Any], one: PairSeries) -> str:
    """The place of the first difference, the reason why there is no comparison, or the largest difference."""
    if (where := pair["first_divergence"]) is not None:
        place = [
            f"step {where['step']}",
            sentences.PHASES[where["phase"]],
            f"unit {sentences.short(sentences.unit_name(where['unit']), 30)}",
        ]
        found = f"where: {', '.join([*place, 'event ' + where['event'].replace('_', '-')])}"
        # The headline of a bug has its diagnosis.
        diagnosis = sentences.looks_like(pair, one.sketched) if pair["verdict"] != "bug" else None
        return f"{found}\n{diagnosis}" if diagnosis else found
    if not one.verdict.judged or pair["diagnosis"] is not None:
        return sentences.looks_like(pair, one.sketched) or ""
    worst = Worst.of(one.verdict.judged)
    return f"compared: {worst.num:,} quantities, {worst.num_equal:,} equal; {sentences.worst_of(worst)}"


def _besides(report: dict[str, Any]) -> list[str]:
    """Lines about settings, notes, bits, power, collectives, and excluded parameters."""
    texts = []
    if settings := next((pair["settings"] for pair in report["pairs"] if pair["settings"]), []):
        more = f", and {len(settings) - 1} more" if len(settings) > 1 else ""
        texts.append(f"settings that differ: {sentences.short(settings[0], 100)}{more}")
    texts += [f"environment: {text}" for text in _explanations(report)[:1]]
    if notes := next((pair["notes"] for pair in report["pairs"] if pair["notes"]), []):
        texts += [sentences.short(note, 160) for note in notes]
    if report["verdict"] in ("rounding", "inconclusive"):
        texts += [sentences.short(f"bits: {text}", 400) for text in _first_of(report, "bits")]
        powers = (text for pair in report["pairs"] if (text := sentences.power_text(pair, ("slope",))))
        texts += [sentences.short(f"power: {text}", 230) for text in powers][:1]
    if (trace := report["trace"]) is not None:
        counts = ", ".join(f"{entry['count']} {kind}" for kind, entry in trace["plan"].items() if entry["count"])
        verdict = "as planned" if trace["equal"] else "NOT as planned; the plan"
        texts.append(f"collectives {verdict}: {counts or 'none'} a step")
    if zero := sorted({name for pair in report["pairs"] for name in pair["zero_gradient_parameters"]}):
        name, mark, part = zero[0].partition(" (")
        first = f"{sentences.short(name, 24)}{mark}{sentences.short(part, 40)}"
        texts.append(f"not counted, since their gradient is zero: {len(zero)}, for instance {first}")
    return texts


def _explanations(report: dict[str, Any]) -> list[str]:
    return [text for pair in report["pairs"] if (text := pair["environment"]["explanation"])]


def _first_of(report: dict[str, Any], name: str) -> list[str]:
    return [pair[name] for pair in report["pairs"] if pair.get(name)][:1]


def _table(rows: Sequence[tuple[dict[str, Any], PairSeries]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("dtype", "ranks", "steps", "verdict", "loss diff.", "bound", "param. diff.", "bound"):
        table.add_column(heading, no_wrap=True, overflow="ellipsis", justify="left" if heading == "dtype" else "right")
    for pair, one in rows:
        worlds, limits = pair["world_size"], sentences.limits(one.bounds)
        table.add_row(
            pair["dtype"],
            str(worlds) if isinstance(worlds, int) else "/".join(map(str, worlds)),
            str(pair["steps"]),
            Text(pair["verdict"].split()[0], style=_STYLES[pair["verdict"]]),
            sentences.number(pair["max_relative_loss_difference"]),
            limits[0].removeprefix("bound "),
            sentences.number(pair["max_relative_parameter_difference"]),
            limits[1].removeprefix("bound "),
        )
    return table
