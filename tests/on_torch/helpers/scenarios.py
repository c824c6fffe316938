"""Scenarios in a table, by name: each is run with torch's implementation and with ours, on all ranks.

Each API has a table and a package of modules that fill it, one for each subject: `fsdp1/scripts` and `fsdp2/scripts`.
"""

import dataclasses
import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import EXHAUSTIVE
from tests.on_torch.helpers.device import DEVICE, TORCH_VERSION
from tests.on_torch.helpers.scripts import PACKAGES, Side, compare

# What two ranks that share a GPU over gloo did not decide, with what was seen. Where a rank ended, or values differed, it is not
# established whether torch, gloo or this project is the cause.
NOT_ON_GPU = {
    "expert_and_pipeline_parallel": "ranks ended, some by an IoException of gloo",
    "tensor_parallel": "ranks ended, some by an IoException of gloo",
    "state": "ranks ended while states were gathered",
    "a_mesh_of_a_group": "ranks ended",
    "backward_that_creates_a_graph_over_a_flat_layout": "ranks ended",
    "cut_on_other_dims": "ranks ended",
    "data_and_gradients_are_replaced-orig": "with data assigned before backward, torch has other full parameters",
    "from_meta_by_reset_parameters": "other losses; perhaps the generator of DTensors, which the first implementation seeds",
    "ignored_parameters": "torch raises: mixed tensors and DTensors",
    "outputs_in_containers": "torch raises: a storage of size 0",
    "units_with_policies_of_their_own": "torch raises: BFloat16 expected",
}
# What torch 2.13 has, which scripts are held to, and 2.11 has not.
OF_NEWER_TORCH = {
    "refused_memory_that_only_one_backend_has",
    "containers_are_indexed",
    "refused_sharing_across_units",
    "refused_placements_that_are_none",
}
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
    return [pytest.param(name, id=name, marks=(*scenario.marks, *_skips(name, scenario))) for name, scenario in ordered]


def _skips(name: str, scenario: Scenario) -> Iterator[pytest.MarkDecorator]:
    if name in OF_NEWER_TORCH and TORCH_VERSION < (2, 13):
        yield pytest.mark.skip("torch 2.13 does this otherwise")
    if DEVICE.type == "cpu":
        return
    subject = scenario.script.__module__.rpartition(".")[2]
    if reason := NOT_ON_GPU.get(name, NOT_ON_GPU.get(subject)):
        yield pytest.mark.skip(reason)
    elif scenario.num_ranks > 2:
        yield pytest.mark.skip("sums of more than two ranks differed in the last bits, or ranks ended")
