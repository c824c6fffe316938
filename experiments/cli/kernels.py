"""The command `python -m experiments kernels`."""

from pathlib import Path
from typing import Annotated

import typer

from crossframe.cli.console import console, exit_on_error


def add_commands(app: typer.Typer) -> None:
    """Give the command line the command."""
    app.command()(kernels)


def kernels(
    fault: Annotated[list[str] | None, typer.Option(help="Only this fault. May be repeated. Default: all")] = None,
    pair: Annotated[
        list[str] | None,
        typer.Option(
            help="torch, jax, ddp-fsdp, ddp-fsdp-2, torch-jax, fused-jax or compiled. May be repeated. Default: all"
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Markdown file for the table, and beside it JSON.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Folder in which programs and recordings stay.")] = None,
) -> None:
    """Inject wrong kernels into small programs and into torch.compile, and report the line that `explain` names."""
    from experiments.kernels.run import run_kernels

    with exit_on_error():
        raise typer.Exit(run_kernels(fault or (), pair or (), output=output, keep=keep, console=console))
