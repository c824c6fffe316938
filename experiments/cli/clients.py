"""The command `python -m experiments clients`."""

from pathlib import Path
from typing import Annotated

import typer

from crossframe.cli.console import console, exit_on_error


def add_commands(app: typer.Typer) -> None:
    """Give the command line the command."""
    app.command()(clients)


def clients(
    only: Annotated[list[str] | None, typer.Option(help="Only this client. May be repeated. Default: all")] = None,
    cache: Annotated[Path, typer.Option(help="Folder of the packages that pip installs.")] = Path("runs/clients"),
    output: Annotated[Path | None, typer.Option(help="JSON file, and beside it Markdown. Default: results/")] = None,
) -> None:
    """Record and compare runs of other people's trainers: correct pairs, and one mistake in each."""
    from experiments.clients.run import run_clients

    with exit_on_error():
        raise typer.Exit(run_clients(only or (), cache=cache, output=output, console=console))
