"""Random module trees and options of fully_shard beside torch's, and the list of differences."""

import os
from dataclasses import fields
from functools import cache

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

import torch_backend
from tests.conftest import EXHAUSTIVE
from tests.on_torch.helpers.paired_runs import Case
from tests.on_torch.helpers.random_trees import LEAVES, OUTPUTS, Node, Tree
from tests.on_torch.programs.departures_fsdp2 import BUGS, DEPARTURES, MENDED
from tests.on_torch.programs.differential import SECONDS_SMALL, around_departures, check, failure_of, run
from tests.on_torch.programs.differential_fsdp2 import ShardOptions, draw_case

pytestmark = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_separate_reduce_scatter_group"),
    reason="torch's fully_shard has all options since 2.13",
)
SEED = 1
# Seeds by world size: a sample of the seeds of `python -m tests.on_torch.programs.differential --api fsdp2`.
NUM_CASES = {2: 10, 3: 5, 4: 5} if os.environ.get(EXHAUSTIVE) else {2: 3, 3: 1, 4: 1}
EACH = 5


@pytest.mark.parametrize(
    ("world_size", "first"),
    [(world_size, first) for world_size, count in NUM_CASES.items() for first in range(0, count, EACH)],
)
def test_R14_random_trees_train_as_under_torch(ranks, world_size, first):
    raised = []
    for number in range(first, min(first + EACH, NUM_CASES[world_size])):
        case = around_departures(draw_case(1000 * SEED + number, world_size))
        raised.append(check(ranks, case, named=f"seed {1000 * SEED + number}, {world_size} ranks"))
    assert sum(map(bool, raised)) <= 1, raised  # or the cases would show little


@pytest.mark.parametrize(
    "departure",
    [
        departure for departure in DEPARTURES if departure.shows != "TimeoutError"
    ],  # which takes as long to see as it says
    ids=lambda departure: departure.name,
)
def test_R14_what_is_excepted_differs_as_stated(ranks, departure):
    assert departure.when(departure.smallest)
    text, raised = failure_of(ranks, departure.smallest)
    assert text and departure.shows in text + raised
    assert failure_of(ranks, around_departures(departure.smallest))[0] == ""


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(bug, marks=pytest.mark.xfail(strict=True, reason=bug.why), id=bug.name)
        for bug in BUGS
        if bug.shows != "TimeoutError"  # which takes as long to see as it says
    ],
)
def test_R14_known_fault(ranks, bug):
    assert failure_of(ranks, bug.smallest, SECONDS_SMALL)[0] == ""


@pytest.mark.parametrize("number", range(len(MENDED)))
def test_R14_what_once_differed_is_the_same(ranks, number):
    assert failure_of(ranks, MENDED[number])[0] == ""


@cache
def _many_cases() -> list[Case]:
    return [draw_case(seed, 2 + seed % 3) for seed in range(1500)]


@pytest.mark.parametrize("departure", (*BUGS, *DEPARTURES), ids=lambda departure: departure.name)
def test_what_avoids_a_departure_leaves_none_of_it(departure):
    met = [case for case in (departure.smallest, *_many_cases()) if departure.when(case)]
    for case in met:
        assert not departure.when(departure.avoid(case)), case


def test_all_that_can_be_drawn_is_drawn():
    cases = _many_cases()
    options = [case.options for case in cases]
    for field in fields(ShardOptions):
        if field.name != "steps":
            assert len({getattr(o, field.name) for o in options}) > 1, field.name
    nodes = [node for case in cases for node in case.nodes]
    assert {node.kind for node in nodes} == {"group", *LEAVES}
    assert {node.output for node in nodes} == set(OUTPUTS)
    assert {node.frozen for node in nodes} == {"", "all", "first"}
    assert {node.uses for node in nodes} == {0, 1, 2}


def test_the_same_seed_draws_the_same_case():
    assert draw_case(7, 3) == draw_case(7, 3)


def _gradients(rank: int, world_size: int, case: Case) -> list[torch.Tensor]:
    """This rank's parts of our gradients after the first step."""
    return [value for label, value in run(case, torch_backend, rank) if label.startswith("grad (step 0")]


@pytest.mark.parametrize(("world_size", "replicate"), [(2, 0), (4, 2)])
def test_R27_a_divide_factor_takes_the_place_of_the_number_of_ranks_on_gloo(ranks, world_size, replicate):
    tree = Tree(Node(children=(Node("mlp", unit=True, size=3), Node("square")), unit=True), exact=True)
    mean = Case(tree, ShardOptions(steps=1, replicate=replicate), world_size)
    divided = Case(tree, ShardOptions(steps=1, replicate=replicate, divide=3.0), world_size)
    means, others = (ranks.run(world_size, _gradients, case) for case in (mean, divided))
    for one, other in zip(means, others, strict=True):
        assert one and len(one) == len(other)
        for mine, grad in zip(one, other, strict=True):
            assert torch.equal(mine * world_size, grad * 3)  # both exact: sums of multiples of 12
