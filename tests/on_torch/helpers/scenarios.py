"""Scenarios in a table, by name: each is run with torch's implementation and with ours, on all ranks.

Each API has a table and a package of modules that fill it, one for each subject: `fsdp1/scripts` and `fsdp2/scripts`.
"""

import dataclasses
import os
import pkgutil
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import EXHAUSTIVE
from tests.on_torch.helpers.scripts import PACKAGES, Side, compare

EVERY = EXHAUSTIVE in os.environ
"""Whether every combination runs."""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A script, and how it is tested.

    Attributes:
        script: a function of a side.
        side: makes the side, from a package, a rank and a world size.
        num_ranks: the number of ranks that run it.
        marks: of the test.
    """

    script: Callable[[Any], Any]
    side: Callable[[str, int, int], Side]
    num_ranks: int
    marks: tuple[pytest.MarkDecorator, ...]

    def difference(self, rank: int, world_size: int) -> str:
        """The first difference between torch and ours on this rank, or ""."""
        return compare(self.script, *(self.side(package, rank, world_size) for package in PACKAGES))


def load(package: ModuleType) -> None:
    """Import all modules of a package, so that they register their scenarios."""
    for module in pkgutil.iter_modules(package.__path__):
        import_module(f"{package.__name__}.{module.name}")


def cases(table: Mapping[str, Scenario]) -> list[Any]:
    """Parameters of a test, ordered by the number of ranks, so that tests of one world run one after another."""
    ordered = sorted(table.items(), key=lambda item: item[1].num_ranks)
    return [pytest.param(name, id=name, marks=scenario.marks) for name, scenario in ordered]
