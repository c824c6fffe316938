"""The command `python -m experiments fsdp-scripts`."""

from pathlib import Path
from typing import Annotated

import typer

from crossframe.cli.console import console, exit_on_error


def add_commands(app: typer.Typer) -> None:
    """Give the command line the command."""
    app.command()(fsdp_scripts)


def fsdp_scripts(
    only: Annotated[list[str] | None, typer.Option(help="Only this script. May be repeated. Default: all")] = None,
    cache: Annotated[Path, typer.Option(help="Folder of the packages that pip installs.")] = Path("runs/fsdp_scripts"),
    output: Annotated[Path | None, typer.Option(help="JSON file, and beside it Markdown. Default: results/")] = None,
) -> None:
    """Run scripts that train with torch's FSDP, and again with torch_backend's, and compare what they write in every bit."""
    from experiments.fsdp_scripts.run import run_scripts

    with exit_on_error():
        raise typer.Exit(run_scripts(only or (), cache=cache, output=output, console=console))
