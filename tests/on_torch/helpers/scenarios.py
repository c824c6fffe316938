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
import torch

from tests.conftest import EXHAUSTIVE
from tests.on_torch.helpers.device import DEVICE
from tests.on_torch.helpers.scripts import PACKAGES, Side, compare

# What gloo, or torch's own FSDP2 over gloo, does not do with tensors on a GPU: processes end, or torch raises.
NOT_ON_GPU = {
    "expert_and_pipeline_parallel": "gloo sends no tensors of a GPU from rank to rank",
    "tensor_parallel": "gloo has no collectives of DTensors of a GPU",
    "state": "torch broadcasts and gathers states of a GPU by collectives that gloo has not",
    "a_mesh_of_a_group": "the mesh of a group of gloo is on the CPU",
    "backward_that_creates_a_graph_over_a_flat_layout": "torch's process ends",
    "cut_on_other_dims": "torch's process ends",
    "data_and_gradients_are_replaced-orig": "torch copies assigned data into shards, and does not wait before it gathers them",
    "from_meta_by_reset_parameters": "DTensors draw numbers on a GPU by a state that the first of both implementations sets",
    "ignored_parameters": "torch's optimizers for GPUs take no DTensors beside tensors",
    "outputs_in_containers": "torch frees what outputs are views of",
    "units_with_policies_of_their_own": "torch raises of the dtypes of a matrix product",
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
    if name in OF_NEWER_TORCH and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        yield pytest.mark.skip("torch 2.13 does this otherwise")
    if DEVICE.type == "cpu":
        return
    subject = scenario.script.__module__.rpartition(".")[2]
    if reason := NOT_ON_GPU.get(name, NOT_ON_GPU.get(subject)):
        yield pytest.mark.skip(reason)
    elif scenario.num_ranks > 2:
        yield pytest.mark.skip("gloo adds up more than two ranks of a GPU in an order of its own")
