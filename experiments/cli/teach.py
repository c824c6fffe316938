"""The command `python -m experiments teach`."""

from pathlib import Path
from typing import Annotated

import typer

from crossframe.cli.console import exit_on_error


def add_commands(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(teach)


def teach(
    lessons: Annotated[
        list[Path] | None, typer.Argument(help="Files, or names of lessons. Default: all lessons")
    ] = None,
    update: Annotated[bool, typer.Option("--update", help="Write outputs and pictures into the lessons.")] = False,
) -> None:
    """Run the code of the lessons, and compare its output and pictures with those that they show."""
    from experiments.teach.command import run_lessons

    with exit_on_error():
        raise typer.Exit(run_lessons(lessons or [], update=update))
