"""Random module trees and options beside torch.distributed.fsdp, and the list of differences."""

import os
import random
from dataclasses import fields, replace
from functools import cache

import pytest
import torch

from crossframe.errors import UsageError
from tests.conftest import EXHAUSTIVE
from tests.on_torch.helpers import paired_runs
from tests.on_torch.helpers.paired_runs import Case, difference
from tests.on_torch.helpers.random_trees import LEAVES, OUTPUTS, Grower, Node, Tree
from tests.on_torch.programs.departures_fsdp1 import BUGS, DEPARTURES, MENDED
from tests.on_torch.programs.differential import around_departures, check, failure_of, shrink
from tests.on_torch.programs.differential_fsdp1 import HYBRIDS, STRATEGIES, WrapOptions, draw_case

SEED = 1
# Seeds by world size: a sample of the seeds of `python -m tests.on_torch.programs.differential`.
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
    assert sum(map(bool, raised)) <= EACH // 2, raised  # or the cases would show little


@pytest.mark.parametrize("departure", DEPARTURES, ids=lambda departure: departure.name)
def test_R14_what_is_excepted_differs_as_stated(ranks, departure):
    assert departure.when(departure.smallest)
    text, raised = failure_of(ranks, departure.smallest)
    assert text and departure.shows in text + raised
    assert failure_of(ranks, around_departures(departure.smallest))[0] == ""


@pytest.mark.parametrize(
    "bug",
    [pytest.param(bug, marks=pytest.mark.xfail(strict=True, reason=bug.why), id=bug.name) for bug in BUGS],
)
def test_R14_known_fault(ranks, bug):
    assert failure_of(ranks, bug.smallest)[0] == ""


@pytest.mark.parametrize("number", range(len(MENDED)))
def test_R14_what_once_differed_is_the_same(ranks, number):
    assert failure_of(ranks, MENDED[number])[0] == ""


@cache
def _many_cases() -> list[Case]:
    return [draw_case(seed, 2 + seed % 3) for seed in range(1500)]


@pytest.mark.parametrize("departure", (*BUGS, *DEPARTURES), ids=lambda departure: departure.name)
def test_what_avoids_a_departure_leaves_none_of_it(departure):
    met = [case for case in (departure.smallest, *_many_cases()) if departure.when(case)]
    assert len(met) > 1  # or it would not be drawn
    for case in met:
        assert not departure.when(departure.avoid(case)), case


def test_a_case_is_made_smaller_as_far_as_it_fails():
    def fails(case: Case) -> bool:
        return case.options.evals and any(node.kind == "mlp" and node.unit for node in case.nodes)

    case = next(c for seed in range(1000) if fails(c := draw_case(seed, 2)))
    small = shrink(case, fails, limit=2000)
    assert small.options == WrapOptions(evals=True, steps=1)
    assert [node.kind for node in small.nodes] == ["group", "mlp"]
    assert eval(repr(small), globals() | {"Mixed": None}) == small


def test_all_that_can_be_drawn_is_drawn():
    cases = [draw_case(seed, world_size) for seed in range(400) for world_size in (2, 4)]
    options = [case.options for case in cases]
    assert {o.sharding_strategy for o in options} == set(STRATEGIES)
    for field in fields(WrapOptions):
        if field.name not in ("steps", "shard_size"):
            assert len({getattr(o, field.name) for o in options}) > 1, field.name
    nodes = [node for case in cases for node in case.nodes]
    assert {node.kind for node in nodes} == {"group", *LEAVES}
    assert {node.output for node in nodes} == set(OUTPUTS)
    assert {node.frozen for node in nodes} == {"", "all", "first"}
    assert {node.uses for node in nodes} == {0, 1, 2}
    for name in ("again", "ties", "ignored", "unit"):
        assert {getattr(node, name) for node in nodes} == {False, True}
    for case in cases:  # what a flat parameter cannot hold is not drawn
        if not case.options.use_orig_params:
            assert all(node.frozen != "first" for node in case.nodes)


def test_the_same_seed_draws_the_same_case():
    assert draw_case(7, 3) == draw_case(7, 3)
    assert Grower(random.Random(7)).tree() == Grower(random.Random(7)).tree()


def test_R32_only_cases_whose_sums_are_exact_are_compared_by_bits_past_two_ranks():
    for seed in range(300):
        case = draw_case(seed, 2 + seed % 3)
        assert case.bits == (case.world_size == 2 or case.tree.exact)
        assert case.bits or case.tree.root.dtype == "float64"
        assert (case.options.sharding_strategy in HYBRIDS) == bool(case.options.shard_size)


PLAIN = Case(Tree(Node(children=(Node("vector"),), unit=True)), WrapOptions())


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23])),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
        (torch.tensor([1.0]), torch.tensor([[1.0]])),
        (torch.tensor([1.0]), torch.tensor([float("nan")])),
        (torch.tensor([1.0]), None),
        (["a", "b"], ["b", "a"]),
        (ValueError("no"), torch.tensor([1.0])),
        (ValueError("no"), TypeError("no")),
        (RuntimeError("no memory"), RuntimeError("no such name")),
    ],
)
def test_R32_histories_that_differ_in_a_bit_differ(theirs, ours):
    assert difference([("grad", theirs)], [("grad", theirs)], PLAIN) == ""
    assert "grad" in difference([("grad", theirs)], [("grad", ours)], PLAIN)
    assert difference([("grad", theirs)], [("param", theirs)], PLAIN)
    assert difference([("grad", theirs)], [("grad", theirs)] * 2, PLAIN)


def test_R32_an_error_of_torchs_kind_and_words_is_the_same(monkeypatch):
    theirs, ours = [("raises", ValueError("scalars are not supported"))], [("raises", UsageError("'w' has no dims"))]
    assert difference(theirs, [("raises", UsageError("scalars are not supported"))], PLAIN) == ""
    assert difference(theirs, ours, PLAIN)
    monkeypatch.setattr(paired_runs, "MEANINGS", (("scalars are not", "has no dims"),))
    assert difference(theirs, ours, PLAIN) == ""


def test_R32_a_bound_lets_rounding_pass_and_nothing_else():
    case = replace(PLAIN, bits=False, world_size=3)
    one = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert difference([("grad", one)], [("grad", one * (1 + 1e-15))], case) == ""
    assert difference([("grad", one)], [("grad", one * (1 + 1e-7))], case)


def test_R32_both_blow_up_at_one_entry_or_differ():
    case = replace(PLAIN, bits=False, world_size=3)
    large, nan = torch.tensor([2.0**21]), torch.tensor([float("nan")])
    assert difference([("grad", large)], [("grad", large * 2)], case) == ""
    assert difference([("grad", nan)], [("grad", large)], case) == ""
    assert difference([("grad", large)], [("grad", large * 2)], PLAIN)
    assert "ours did not" in difference([("grad", nan)], [("grad", torch.ones(1))], case)
    assert difference([("grad", torch.ones(1))], [("grad", nan)], case)
