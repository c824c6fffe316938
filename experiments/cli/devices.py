"""The command `python -m experiments devices`."""

from pathlib import Path
from typing import Annotated

import typer

from crossframe.cli.console import console, exit_on_error


def add_commands(app: typer.Typer) -> None:
    """Give the command line the command."""
    app.command()(devices)


def devices(
    only: Annotated[
        list[str] | None, typer.Option(help="Only cases with this in their name. May be repeated. Default: all")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Recordings made side by side.", min=1, max=64)] = 1,
    output: Annotated[Path | None, typer.Option(help="JSON file. Default: runs/devices.json")] = None,
    keep: Annotated[Path | None, typer.Option(help="New folder in which recordings stay. Default: none")] = None,
) -> None:
    """Compare runs of one training on a CPU and a GPU, with other kernels and dtypes, and with mistakes."""
    from experiments.devices.run import run_devices

    with exit_on_error():
        raise typer.Exit(run_devices(only or (), jobs, output, keep, console))
