"""Finds the user's lines in a stack: those of neither a framework, nor Python itself, nor this project."""

import linecache
import site
import sysconfig
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from crossframe.operators.trace import SourceLine

# Not resolved: frames state files as they were found, by way of links.
_ROOT = Path(__file__).parents[2]
_OWN = tuple(
    f"{_ROOT}/{own}"
    for own in ("torch_backend/", "crossframe/", "jax_backend/", "experiments/__main__.py", "experiments/cli/")
)
_PYTHON = tuple(str(Path(sysconfig.get_paths()[kind])) for kind in ("stdlib", "platstdlib"))
_INSTALLED = tuple(site.getsitepackages())
_names: dict[str, str] = {}

Frame = tuple[str, int, str]
"""File, line number and function name."""


class UserCode:
    """Tells the user's lines from those of libraries.

    Args:
        frameworks: names of packages whose lines are not the user's.
    """

    def __init__(self, *frameworks: str) -> None:
        specs = [find_spec(name) for name in frameworks]
        self._frameworks = tuple(
            f"{folder}/" for spec in specs if spec is not None for folder in spec.submodule_search_locations or ()
        )
        self._excluded = ("<", *self._frameworks, *_OWN)

    def has(self, file: str) -> bool:
        """Whether a file is the user's. Installed packages other than the frameworks and this project count as the user's."""
        if file.startswith(self._excluded):
            return False
        return file.startswith(_INSTALLED) or not file.startswith(_PYTHON)

    def innermost(self, frames: Iterable[Frame]) -> SourceLine | None:
        """The first of the user's lines; None if there is none.

        Args:
            frames: the stack, innermost frame first.
        """
        return next((line_of(*frame) for frame in frames if self.has(frame[0])), None)


def call_file(file: str, name: str) -> None:
    """Let lines of a file state this name of it, such as the path of a script as the user gave it."""
    _names[file] = name


def line_of(file: str, number: int, function: str) -> SourceLine:
    """A line with its code."""
    return SourceLine(_names.get(file, file), number, function, linecache.getline(file, number).strip())
