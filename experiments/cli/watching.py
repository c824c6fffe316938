"""The command `python -m experiments watching`."""

from pathlib import Path
from typing import Annotated

import typer

from crossframe.cli.console import console, exit_on_error


def add_commands(app: typer.Typer) -> None:
    """Give the command line the command."""
    app.command()(watching)


def watching(
    only: Annotated[
        list[str] | None, typer.Option(help="Only cases whose name has this text. May be repeated. Default: all")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file. Default: results/watching.json")] = None,
) -> None:
    """Record healthy and faulty runs with a monitor, once, and count its alarms."""
    from experiments.watching.run import run_watching

    with exit_on_error():
        raise typer.Exit(run_watching(only or (), output, console))
