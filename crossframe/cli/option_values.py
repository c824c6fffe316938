"""Checks of option values, and printing and writing of results, shared by the commands."""

from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from crossframe.errors import UsageError
from crossframe.quoting import quote

Choice = TypeVar("Choice", bound=Enum)
MAX_PERTURBED_RUNS = 64
# Characters to a line where no terminal says how many there are.
WIDTH = 120


def choice(option: str, kind: type[Choice], asked: str) -> Choice:
    """The member of an enum that an option names by value.

    Raises:
        UsageError: no such member.
    """
    for member in kind:
        if member.value == asked:
            return member
    raise refused(option, (str(member.value) for member in kind), asked)


def refused(option: str, expected: Iterable[str], asked: str) -> UsageError:
    """The error for an option that is not one of the expected words."""
    return UsageError(f"{option}: expected one of {', '.join(expected)}, got {quote(asked)}")


def width_of(console: Console) -> int:
    """Number of characters per line."""
    return console.width if console.is_terminal else WIDTH


def put(console: Console, text: str) -> None:
    """Print text verbatim."""
    console.print(text, markup=False, highlight=False, emoji=False)


def write_svg(path: Path, drawing: str) -> None:
    """Write a drawing.

    Raises:
        OSError: it cannot be written there.
    """
    path.write_text(drawing, encoding="utf-8")


def check_size(name: str, value: object, least: int, most: int) -> None:
    """Refuse a size that is out of range.

    Raises:
        UsageError: not an integer from `least` to `most`.
    """
    if type(value) is not int or value < least:
        raise UsageError(f"{name}: expected an integer of at least {least}, got {quote(value)}")
    if value > most:
        raise UsageError(f"{name}: expected at most {most}, got {quote(value)}")


def check_perturbed_runs(number: object) -> None:
    """Refuse a number of perturbed runs that is out of range.

    Raises:
        UsageError: neither 0 nor from 2 to MAX_PERTURBED_RUNS.
    """
    if type(number) is not int or number < 0 or number == 1:
        raise UsageError(
            f"perturbed-runs: expected 0, or 2 and more (4 are good), got {quote(number)}: one alone shows no spread"
        )
    check_size("perturbed-runs", number, 0, MAX_PERTURBED_RUNS)
