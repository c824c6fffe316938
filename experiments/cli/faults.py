"""The commands `python -m experiments faults` and `python -m experiments clean-pairs`."""

from pathlib import Path
from typing import Annotated

import typer

from crossframe.cli.console import console, exit_on_error

Dtypes = Annotated[
    list[str] | None, typer.Option("--dtype", help="float64, float32 or bfloat16. May be repeated. Default: all")
]
Output = Annotated[Path | None, typer.Option(help="Markdown file for the table, and beside it JSON. Default: none")]
Keep = Annotated[Path | None, typer.Option(help="Folder in which recordings stay. Default: they are deleted")]


def add_commands(app: typer.Typer) -> None:
    """Give the command line both."""
    app.command()(faults)
    app.command("clean-pairs")(clean_pairs)


def faults(
    fault: Annotated[list[str] | None, typer.Option(help="Only this fault. May be repeated. Default: all")] = None,
    dtype: Dtypes = None,
    output: Output = None,
    keep: Keep = None,
    jobs: Annotated[int, typer.Option(help="So many processes judge, each with recorders of its own.")] = 1,
    names: Annotated[bool, typer.Option("--list", help="Only name the faults, and say what they are.")] = False,
) -> None:
    """Inject known faults into runs, and report whether each is found, located and named."""
    from experiments.faults.run import list_faults, run_faults

    with exit_on_error():
        if names:
            list_faults(console)
            return
        raise typer.Exit(run_faults(fault or (), dtype or (), output=output, keep=keep, jobs=jobs, console=console))


def clean_pairs(
    model: Annotated[list[str] | None, typer.Option(help="Only this model. May be repeated. Default: all")] = None,
    dtype: Dtypes = None,
    seed: Annotated[
        list[int] | None, typer.Option(help="Seed of a training. May be repeated. Default: 0, of gpt-tiny 0 and 1")
    ] = None,
    output: Output = None,
    keep: Keep = None,
) -> None:
    """Compare correct runs over worlds, strategies, frameworks and orders of sums, and count false alarms."""
    from experiments.faults.clean import run_clean

    with exit_on_error():
        raise typer.Exit(
            run_clean(model or (), dtype or (), seeds=seed or (), output=output, keep=keep, console=console)
        )
