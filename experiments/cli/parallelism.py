"""The command `python -m experiments parallelism`."""

from pathlib import Path
from typing import Annotated

import typer

from crossframe.cli.console import console, exit_on_error


def add_commands(app: typer.Typer) -> None:
    """Give the command line the command."""
    app.command()(parallelism)


def parallelism(
    cases: Annotated[
        list[str] | None, typer.Argument(help="Faults and forms, for instance row_bias or tp-ours. Default: all")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Markdown file for the tables. Default: results/ if all cases run, else none")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Folder in which recordings stay. Default: they are deleted")
    ] = None,
) -> None:
    """Compare parallel training with one device: correct programs, and faults with expected answers."""
    from experiments.parallelism.run import run_parallelism

    with exit_on_error():
        raise typer.Exit(run_parallelism(cases or (), output=output, keep=keep, console=console))
