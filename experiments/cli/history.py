"""The command `python -m experiments history`."""

from pathlib import Path
from typing import Annotated

import typer

from crossframe.cli.console import console, exit_on_error
from crossframe.cli.option_values import refused


def add_commands(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(history)


def history(
    change: Annotated[list[str] | None, typer.Option(help="Only this change. May be repeated. Default: all")] = None,
    changes: Annotated[str, typer.Option("--set", help="The set of changes: changes or renames.")] = "changes",
    output: Annotated[Path, typer.Option(help="Folder for the repository and the answers.")] = Path("runs/history"),
    table: Annotated[
        bool, typer.Option("--table", help="Only write the table of the answers that are committed.")
    ] = False,
) -> None:
    """Let changes arrive in a small repository, and note what its golden answers to each."""
    from experiments.goldens.history.changes import SETS
    from experiments.goldens.history.run import measure
    from experiments.goldens.history.table import write_table

    with exit_on_error():
        if changes not in SETS:
            raise refused("--set", SETS, changes)
        if table:
            console.print(f"table: {write_table(changes)}")
            return
        answers = measure(changes, change or (), output, console)
        right = sum(answer.right for answer in answers)
        console.print(f"{right} of {len(answers)} answers are right; {output / 'answers.json'}")
