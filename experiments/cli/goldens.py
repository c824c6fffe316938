"""The command `python -m experiments goldens`."""

from pathlib import Path
from typing import Annotated

import typer

from crossframe.cli.console import console, exit_on_error
from crossframe.cli.machine_output import MachineOutput


def add_commands(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(goldens)


def goldens(
    faults: Annotated[bool, typer.Option("--faults", help="Check the faults of the catalogue.")] = False,
    harmless: Annotated[bool, typer.Option("--harmless", help="Check harmless changes.")] = False,
    parity: Annotated[
        bool, typer.Option("--parity", help="Check a parity run in both frameworks against its golden.")
    ] = False,
    record_again: Annotated[
        bool, typer.Option("--record-parity", help="Record the golden of the parity run again.")
    ] = False,
    github: Annotated[
        bool, typer.Option("--github", help="With --parity: an annotation and a summary of GitHub Actions.")
    ] = False,
    num: Annotated[int | None, typer.Option(help="Only so many faults, in an order drawn once. Default: all")] = None,
    framework: Annotated[str | None, typer.Option(help="Only faults of torch or jax. Default: all")] = None,
    fault: Annotated[list[str] | None, typer.Option(help="Only this fault. May be repeated. Default: all")] = None,
    change: Annotated[list[str] | None, typer.Option(help="Only this change. May be repeated. Default: all")] = None,
    output: Annotated[Path, typer.Option(help="Folder for the results as JSON. Answers in it are kept.")] = Path(
        "runs/goldens"
    ),
) -> None:
    """Check faults, harmless changes and parity runs against goldens.

    Exit status: of --parity that of crossframe compare, otherwise 0.
    """
    from experiments.goldens.measure import measure_faults, measure_harmless
    from experiments.goldens.parity import check_parity, record_parity

    with exit_on_error():
        if harmless:
            measure_harmless(change or (), output / "harmless.json", console)
        if faults:
            measure_faults(fault or (), num, framework, output / "faults.json", console)
        if record_again:
            record_parity(console)
        if parity:
            raise typer.Exit(check_parity(console, MachineOutput(github=github)))
