"""The command `python -m experiments foreign`."""

from pathlib import Path
from typing import Annotated

import typer

from crossframe.cli.console import console, exit_on_error


def add_commands(app: typer.Typer) -> None:
    """Give the command line the command."""
    app.command()(foreign)


def foreign(
    pairs: Annotated[list[str] | None, typer.Argument(help="Names of pairs. Default: all", show_default=False)] = None,
    number: Annotated[int, typer.Option("--set", min=1, max=4, help="The set of pairs.")] = 1,
    cache: Annotated[Path, typer.Option(help="Folder of the environments that pip makes.")] = Path("runs/foreign"),
    output: Annotated[Path | None, typer.Option(help="JSON file, and beside it Markdown. Default: results/")] = None,
    freeze: Annotated[
        bool, typer.Option("--freeze", help="Only write which parameters are expected to correspond.")
    ] = False,
) -> None:
    """Align and compare pairs of public implementations of one architecture."""
    from experiments.foreign.run import run_foreign

    with exit_on_error():
        status = run_foreign(pairs or (), number=number, cache=cache, output=output, freezes=freeze, console=console)
        raise typer.Exit(status)
