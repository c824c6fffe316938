"""The command `python -m experiments jax-scripts`."""

from pathlib import Path
from typing import Annotated

import typer

from crossframe.cli.console import console, exit_on_error


def add_commands(app: typer.Typer) -> None:
    """Give the command line the command."""
    app.command()(jax_scripts)


def jax_scripts(
    only: Annotated[list[str] | None, typer.Option(help="Only this script. May be repeated. Default: all")] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file, and beside it Markdown. Default: results/")] = None,
) -> None:
    """Record unchanged scripts of JAX, and compare correct pairs and mistakes of some of them."""
    from experiments.jax_scripts.run import run_jax_scripts

    with exit_on_error():
        raise typer.Exit(run_jax_scripts(only or (), output=output, console=console))
