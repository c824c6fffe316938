"""The command `python -m experiments goldens`."""

from pathlib import Path
from typing import Annotated

import typer

from crossframe.cli.console import console, exit_on_error


def add_commands(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(goldens)


def goldens(
    faults: Annotated[bool, typer.Option("--faults", help="Check the faults of the catalogue.")] = False,
    harmless: Annotated[bool, typer.Option("--harmless", help="Check harmless changes.")] = False,
    num: Annotated[int | None, typer.Option(help="Only so many faults, in an order drawn once. Default: all")] = None,
    change: Annotated[list[str] | None, typer.Option(help="Only this change. May be repeated. Default: all")] = None,
    output: Annotated[Path, typer.Option(help="Folder for the results as JSON.")] = Path("runs/goldens"),
) -> None:
    """Check faults and harmless changes against goldens of at most 200 kB."""
    from experiments.goldens.measure import measure_faults, measure_harmless

    with exit_on_error():
        if harmless:
            measure_harmless(change or (), output / "harmless.json", console)
        if faults:
            measure_faults(num, output / "faults.json", console)
