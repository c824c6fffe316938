"""torch's FSDP1, FSDP2 and DDP and one device, compared: a short form of `python -m experiments bench fsdp-variants`."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from crossframe.errors import UsageError
from crossframe.recording import Recording
from crossframe.verdict import compare
from experiments.bench.contestants import BARE, DDP
from experiments.bench.fsdp_variants.cells import ADAMW, OURS, SGD, THEIRS, Both, Run, pairs, sets
from experiments.bench.fsdp_variants.judge import FINE, Judged, judged
from experiments.bench.fsdp_variants.record import record_all
from experiments.bench.fsdp_variants.special import CASES, record_cases
from experiments.bench.fsdp_variants.special_run import Outcome
from experiments.bench.fsdp_variants.table import column_of, counts, markdown
from experiments.cli.bench import bench
from tests.conftest import EXHAUSTIVE

WORLD_SIZE, STEPS = 2, 2
USUAL = Run("", "gpt-tied", "float64", WORLD_SIZE, SGD, STEPS)
RUNS = [
    replace(USUAL, contestant=BARE, world_size=1),
    *(replace(USUAL, contestant=contestant) for contestant in (*THEIRS, OURS[0])),
]


def _record(rank: int, world_size: int, runs: list[Run], folder: str) -> list[str | None]:
    return record_all(rank, runs, folder)


@pytest.fixture(scope="module")
def recorded(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp_variants")
    for world_size in (1, WORLD_SIZE):
        runs = [run for run in RUNS if run.world_size == world_size]
        assert ranks.run(world_size, _record, runs, str(folder)) == [[None] * len(runs)] * world_size
    return {run: Recording.open(folder / run.folder) for run in RUNS}


def contestants(both: Both) -> set[str]:
    return {both.a.contestant, both.b.contestant}


@pytest.mark.exhaustive
def test_all_of_torchs_own_train_as_one_device_does_and_as_one_another(recorded):
    every = list(pairs(RUNS))
    assert len(every) == 4 + 6
    # Each beside one device and beside ours; torch's own beside one another with pytest --exhaustive.
    some = every if EXHAUSTIVE in os.environ else [both for both in every if {BARE, OURS[0]} & contestants(both)]
    assert len(some) >= 4 + 3
    found = [judged(both, recorded[both.a], recorded[both.b]) for both in some]
    assert [pair for pair in found if not pair.is_fine] == []
    assert any(pair.difference for pair in found), "two ranks and one device round differently"


@pytest.mark.exhaustive
def test_a_DDP_that_sums_instead_of_averaging_is_found_out(ranks, recorded, tmp_path: Path):
    faulty = replace(USUAL, contestant=DDP, setting=ADAMW, fault=True)
    clean = replace(faulty, contestant=BARE, world_size=1, fault=False)
    for run in (faulty, clean):
        assert ranks.run(run.world_size, _record, [run], str(tmp_path)) == [[None]] * run.world_size
    said = compare(*(Recording.open(tmp_path / run.folder) for run in (clean, faulty)))
    assert said.verdict.value == "bug"
    assert said.first_divergence is not None and said.diagnosis is not None
    assert (said.first_divergence.step, said.first_divergence.event) == (0, "all_reduce")
    assert said.diagnosis.signature == "constant_factor"


def test_what_a_set_holds_and_what_of_it_is_compared():
    (runs,) = sets(["mlp"], [2, 3], ["float64"], [ADAMW])
    assert len(runs) == 1 + 2 * 5
    kinds = [both.kind for both in pairs(runs)]
    assert {kind: kinds.count(kind) for kind in kinds} == {"one device": 10, "same ranks": 20, "other ranks": 5}
    (runs,) = sets(["conv"], [2, 3], ["float32"], [ADAMW])
    both = list(pairs(runs))
    assert all(each.a.perturbed_runs or each.b.perturbed_runs for each in both)
    assert sorted({each.kind for each in both if each.by_definition}) == ["one device", "other ranks"]
    with pytest.raises(UsageError, match="ranks: expected among 1, 2, 3, 4, got 5"):
        sets([], [5], [])


def test_the_table_counts_by_who_was_compared_and_lists_what_parts():
    def pair(a: str, b: str, kind: str, verdict: str) -> Judged:
        return Judged("mlp", "float64", ADAMW, kind, a, b, verdict, why="at step 0 they part")

    some = [
        pair("torch FSDP1 on 2", "torch DDP on 2", "same ranks", "equal"),
        pair("torch FSDP1 on 2", "our FSDP1 on 2", "same ranks", "bug"),
        pair("one device", "our FSDP1 on 2", "one device", "rounding"),
    ]
    assert len({column_of(each) for each in some}) == 3
    assert counts(some) == "1 equal, 1 rounding, **1 bug**"
    text = markdown(some, [], ["`python -m experiments bench fsdp-variants`: here"])
    assert "- mlp, float64, adamw: torch FSDP1 on 2 against our FSDP1 on 2: **bug**: at step 0 they part" in text


@pytest.mark.exhaustive
def test_of_each_special_case_that_parts_it_is_known_why(ranks, tmp_path: Path):
    """Those that are torch's own faults: what FSDP1 does not reduce, and DDP's assertion; and ours beside them."""
    names = ("a unit not used in the last microbatch, NO_SHARD", "a hybrid mesh of shards of one rank")
    cases = [case for case in CASES if case.name in names]
    found = {}
    said = [ranks.run(world_size, _record_cases, cases, str(tmp_path)) for world_size in (1, WORLD_SIZE)]
    assert [each for of_rank in (*said[0], *said[1]) for each in of_rank if each] == []
    for case in cases:
        verdict = compare(*(Recording.open(tmp_path / case.folder / which) for which in ("alone", "ranks")))
        found[case.name, case.contestant] = verdict
        outcome = Outcome(case.name, case.contestant, verdict.verdict.value, "", None, case.expected)
        assert not outcome.surprises, verdict
    for name in names:
        assert found[name, "torch FSDP1"].verdict.value == "bug"
        assert found[name, "our FSDP1"].verdict.value in FINE
        where = found[name, "torch FSDP1"].first_divergence
        assert where is not None and (where.step, where.phase) == (0, "reduce"), where


def _record_cases(rank: int, world_size: int, cases: list, folder: str) -> list[str | None]:
    return record_cases(rank, cases, folder)


def test_the_former_name_of_the_command_still_works_but_is_hidden():
    hidden = {each.name: each.hidden for each in bench.registered_commands}
    assert hidden["own"] and not hidden["fsdp-variants"]
