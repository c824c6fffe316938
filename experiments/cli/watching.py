"""The command `python -m experiments watching`."""

from pathlib import Path
from typing import Annotated

import typer

from crossframe.cli.console import console, exit_on_error


def add_commands(app: typer.Typer) -> None:
    """Give the command line the command."""
    app.command()(watching)


def watching(
    cases: Annotated[str, typer.Option("--set", help="The set of cases: first or second.")] = "first",
    only: Annotated[
        list[str] | None, typer.Option(help="Only cases whose name has this text. May be repeated. Default: all")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file. Default: results/ and the name of the set")] = None,
) -> None:
    """Record healthy and faulty runs with a monitor, once, and count its alarms."""
    from experiments.watching.run import run_watching

    with exit_on_error():
        raise typer.Exit(run_watching(cases, only or (), output, console))
