"""The command `python -m experiments untouched`."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from crossframe.cli.commands import app as product
from crossframe.cli.console import console, exit_on_error, run_command


def add_commands(app: typer.Typer) -> None:
    """Give the command line the command."""
    app.command()(untouched)


def untouched(
    only: Annotated[
        list[str] | None, typer.Option(help="Only this fault, clean pair or axis. May be repeated. Default: all")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Cases that run side by side.", min=1, max=64)] = 1,
    output: Annotated[Path | None, typer.Option(help="JSON file, and beside it Markdown. Default: results/")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only load the cases, and run every script unrecorded.")
    ] = False,
) -> None:
    """Run the untouched cases once: faults with expected answers, and clean pairs."""
    from experiments.untouched.run import run_untouched

    with exit_on_error():
        command = partial(run_command, typer.main.get_command(product))
        raise typer.Exit(
            run_untouched(only or (), command=command, jobs=jobs, output=output, checks=check, console=console)
        )
