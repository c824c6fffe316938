"""Runs commands, those of `crossframe` and those of `python -m experiments`, whichever has the given one."""

from typing import Any

from typer.testing import CliRunner

from crossframe.cli import entry
from crossframe.cli.commands import app as product
from experiments.cli.commands import app as research

PRODUCT = ("record", "baseline", "bisect", "check", "compare", "explain", "inspect", "layout", "plan")


def module_of(command: str) -> str:
    """The module that `python -m` runs for a command."""
    return "crossframe" if command in PRODUCT or command.startswith("-") else "experiments"


def invoke(*arguments: object) -> tuple[int, str]:
    """Run a command in this process; returns its exit status, and all that it printed on one line."""
    words = [str(argument) for argument in arguments]
    result: Any = CliRunner().invoke(product if module_of(words[0]) == "crossframe" else research, words)
    return result.exit_code, " ".join(result.output.split())


def status_of(*arguments: object) -> int:
    """Run a command in this process as its program does; returns its exit status."""
    words = [str(argument) for argument in arguments]
    return entry.run(words, f"{module_of(words[0])}.cli.commands")
