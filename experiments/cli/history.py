"""The command `python -m experiments history`."""

from pathlib import Path
from typing import Annotated

import typer

from crossframe.cli.console import console, exit_on_error


def add_commands(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(history)


def history(
    change: Annotated[list[str] | None, typer.Option(help="Only this change. May be repeated. Default: all")] = None,
    output: Annotated[Path, typer.Option(help="Folder for the repository and the answers.")] = Path("runs/history"),
    table: Annotated[
        bool, typer.Option("--table", help="Only write the table of the answers that are committed.")
    ] = False,
) -> None:
    """Let twenty changes arrive in a small repository, and note what its golden answers to each."""
    from experiments.goldens.history.run import measure
    from experiments.goldens.history.table import write_table

    with exit_on_error():
        if table:
            console.print(f"table: {write_table()}")
            return
        answers = measure(change or (), output, console)
        right = sum(answer.right for answer in answers)
        console.print(f"{right} of {len(answers)} answers are right; {output / 'answers.json'}")
