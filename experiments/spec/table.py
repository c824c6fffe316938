"""What a run counted, as a table with a row a rule."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from experiments.spec.checks import CHECKS, TORCH, Check
from experiments.spec.rules import TITLES
from experiments.spec.tally import Tally

COLUMNS = ("cases", "agreed", "explained", "unexplained")


def print_table(console: Console, rules: Sequence[str], found: Mapping[str, Tally], ran: Sequence[Check]) -> None:
    """Print the table, under it each reason of an explained case with an example, and each unexplained case."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("rule", no_wrap=True)
    table.add_column("about")
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("compared with")
    table.add_column("note")
    reasons: list[str] = []
    for rule in rules:
        _add_row(table, rule, found.get(rule), ran, reasons)
    console.print(table, soft_wrap=False)
    for number, reason in enumerate(reasons, 1):
        console.print(f"\nnote {number}: {reason}", markup=False, highlight=False)
    for rule in rules:
        tally = found.get(rule)
        if tally is not None and tally.failures:
            console.print(f"\n{rule}: {_count(tally.unexplained)} unexplained, the first of them:", style="bold red")
            for line in tally.failures:
                console.print(f"  {line}", markup=False, highlight=False)


def _add_row(table: Table, rule: str, tally: Tally | None, ran: Sequence[Check], reasons: list[str]) -> None:
    of_rule = [check for check in CHECKS if rule in check.rules]
    missing = any(check.against == TORCH and check not in ran for check in of_rule)
    notes = ["torch is not installed"] if missing else []
    if not of_rule:
        notes.append("by the tests alone")
    if tally is None:
        table.add_row(rule, TITLES[rule], *[""] * len(COLUMNS), "", ", ".join(notes), style="dim")
        return
    for reason, count in tally.explained.items():
        reasons.append(f"{rule}, {_count(count)}: {reason}. For instance: {tally.examples[reason]}")
        notes.append(f"note {len(reasons)}")
    counts = (tally.num_cases, tally.agreed, tally.explained.total(), tally.unexplained)
    against = dict.fromkeys(check.against for check in of_rule if check in ran)
    style = "red" if tally.unexplained else None
    table.add_row(rule, TITLES[rule], *map(_thousands, counts), ", ".join(against), ", ".join(notes), style=style)


def _count(number: int) -> str:
    return f"{_thousands(number)} case{'s' if number != 1 else ''}"


def _thousands(number: int) -> str:
    return f"{number:,}"
