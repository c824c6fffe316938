"""The `python -m experiments spec` command: run the checks, print the table, say how it ended."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from experiments.spec.checks import CHECKS
from experiments.spec.rules import TITLES, known_rules
from experiments.spec.run import run_checks, runnable
from experiments.spec.table import print_table


def run_spec(*, quick: bool, rules: tuple[str, ...], console: Console) -> int:
    """Compare the rules with what torch builds, with the reference and with closed forms, and print a table.

    Args:
        quick: compare a sample of the cases, in seconds, instead of all of them, in minutes.
        rules: numbers of rules such as "R04", in any case; none means all.

    Returns:
        The exit status: 0 if every case agrees or is explained, 1 if one is not, 2 if nothing could be compared.

    Raises:
        UsageError: a rule that does not exist.
    """
    named = set(known_rules(rules))
    asked = [rule for rule in TITLES if not named or rule in named]
    checks = runnable([check for check in CHECKS if set(check.rules) & set(asked)])
    started = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} parts"))
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as shown:
        task = shown.add_task("comparing", total=None)
        found = run_checks(
            checks, quick=quick, progress=lambda done, total: shown.update(task, completed=done, total=total)
        )
    print_table(console, asked, found, checks)
    tallies = [tally for rule, tally in found.items() if rule in asked]
    num_cases, unexplained = sum(t.num_cases for t in tallies), sum(t.unexplained for t in tallies)
    seconds = time.monotonic() - started
    extent = "a sample" if quick else "all cases"
    console.print(f"\n{num_cases:,} cases ({extent}) in {seconds:.0f} s, {unexplained:,} unexplained", highlight=False)
    if not num_cases:
        return 2
    return 1 if unexplained else 0
