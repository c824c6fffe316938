"""The command `python -m experiments parallelism`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from crossframe.cli.console import console, exit_on_error
from crossframe.errors import UsageError


def add_commands(app: typer.Typer) -> None:
    """Give the command line the command."""
    app.command()(parallelism)


def parallelism(
    cases: Annotated[
        list[str] | None, typer.Argument(help="Faults and forms, for instance row_bias or tp-ours. Default: all")
    ] = None,
    name: Annotated[str, typer.Option("--set", help="parallelism: the first set of cases. second: the other one")] = (
        "parallelism"
    ),
    output: Annotated[
        Path | None, typer.Option(help="Markdown file for the tables. Default: results/ if all cases run, else none")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Folder in which recordings stay. Default: they are deleted")
    ] = None,
) -> None:
    """Compare parallel training with one device: correct programs, and faults with expected answers."""
    from experiments.parallelism import cases as first
    from experiments.parallelism.run import run_parallelism
    from experiments.parallelism.second import cases as second

    sets: dict[str, Any] = {"parallelism": first, "second": second}
    with exit_on_error():
        if name not in sets:
            raise UsageError(f"--set: expected one of {', '.join(sets)}, got {name}")
        clean, faults = sets[name].CLEAN, sets[name].FAULTS
        raise typer.Exit(
            run_parallelism(
                cases or (), name=name, clean=clean, faults=faults, output=output, keep=keep, console=console
            )
        )
