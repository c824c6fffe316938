"""The command `python -m experiments public-scripts`."""

from pathlib import Path
from typing import Annotated

import typer

from crossframe.cli.console import console, exit_on_error


def add_commands(app: typer.Typer) -> None:
    """Give the command line the command."""
    app.command()(public_scripts)


def public_scripts(
    repositories: Annotated[Path, typer.Argument(help="Folder with a clone of each repository, called owner+name")],
    only: Annotated[list[str] | None, typer.Option(help="Only this case. May be repeated. Default: all")] = None,
    name: Annotated[
        str, typer.Option("--set", help="first, second, third, fourth, fifth, sixth, seventh, eighth or ninth")
    ] = "first",
    cache: Annotated[Path, typer.Option(help="Folder for packages that the scripts need")] = Path("runs/public"),
    output: Annotated[Path | None, typer.Option(help="JSON file, and beside it Markdown. Default: results/")] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Only run scripts, pairs and mistakes, without recording")
    ] = False,
) -> None:
    """Record training scripts of public repositories, twice and with a mistake, and compare."""
    from experiments.public_scripts.run import run_public_scripts

    with exit_on_error():
        options = {"name": name, "cache": cache, "output": output, "console": console, "plain": plain}
        raise typer.Exit(run_public_scripts(repositories, only or (), **options))
