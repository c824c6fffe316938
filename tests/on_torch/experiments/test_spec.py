"""`python -m experiments spec`: the sample of its cases, what it counts, and what it says and returns when something is wrong."""

import io
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor

from crossframe import plan, precision, reduction
from crossframe.api import Api
from crossframe.errors import UsageError
from crossframe.layout import FlatLayout, PerParamLayout
from crossframe.mesh import MeshSpec
from crossframe.parallel import model
from crossframe.params import ParamSpec
from crossframe.reference import World, bucket
from crossframe.state import StateKind
from crossframe.unit_assignment import Order
from experiments.spec import (
    cases,
    checks,
    clean_names,
    command,
    initial,
    lifecycle,
    model_state,
    norms,
    optim_state,
    replaced,
    run,
    step_cases,
    sums,
    table,
    unused,
)
from experiments.spec.checks import CHECKS, CLOSED_FORM, LIFECYCLE, TORCH, Check, Scope
from experiments.spec.fake_ranks import fake_group, fake_mesh, quiet
from experiments.spec.histories import OPERATIONS, REQUESTS, explore
from experiments.spec.lifecycle import SmallWorld, cases_of
from experiments.spec.rules import TITLES
from experiments.spec.tally import KEPT_CASES, Tallies, Tally
from tests.conftest import EXHAUSTIVE

ROOT = Path(__file__).parents[3]
WITH_CHECKS = sorted({rule for check in CHECKS for rule in check.rules})


def spec(*rules, quick=True):
    """The exit status and what was printed, in lines of 160 characters."""
    text = io.StringIO()
    status = command.run_spec(quick=quick, rules=rules, console=Console(file=text, width=160, soft_wrap=True))
    return status, text.getvalue()


def smaller(size_of):
    """`Scope.take` with a sample of `size_of(num_quick)` cases."""
    take = Scope.take
    return lambda scope, cases, num_quick: take(scope, cases, size_of(num_quick))


@pytest.fixture
def few(monkeypatch):
    """At most 15 cases of a kind."""
    monkeypatch.setattr(Scope, "take", smaller(lambda num_quick: min(num_quick, 15)))


def row(printed, rule):
    """The row of a rule, cut into words."""
    return next(line for line in printed.splitlines() if line.startswith(rule + " ")).split()


def numbers(printed, rule):
    """Cases, agreed, explained, unexplained."""
    return tuple(int(word.replace(",", "")) for word in row(printed, rule) if word.replace(",", "").isdigit())[:4]


@pytest.fixture(scope="module")
def whole():
    """The quick form of everything, of samples above thirty a tenth, of worlds three; all of them with pytest --exhaustive."""
    with pytest.MonkeyPatch.context() as patch:
        if EXHAUSTIVE not in os.environ:
            patch.setattr(Scope, "take", smaller(lambda num_quick: min(num_quick, max(30, num_quick // 10))))
            few_worlds = lifecycle.worlds()[::97]
            patch.setattr(lifecycle, "worlds", lambda: few_worlds)
        return spec()


@pytest.mark.exhaustive
def test_every_rule_that_is_checked_agrees_or_is_explained(whole):
    status, printed = whole
    assert status == 0, printed
    for rule in WITH_CHECKS:
        num_cases, agreed, explained, unexplained = numbers(printed, rule)
        assert agreed > 0 and unexplained == 0 and num_cases == agreed + explained, rule
    assert "0 unexplained" in printed.splitlines()[-1]


@pytest.mark.exhaustive
def test_every_rule_has_a_row_with_its_title(whole):
    rows = [line for line in whole[1].splitlines() if line.startswith("R")]
    assert [line[:3] for line in rows[: len(TITLES)]] == [f"R{n:02}" for n in range(1, 40)] == list(TITLES)
    for line in rows[: len(TITLES)]:
        assert " ".join(TITLES[line[:3]].split()) in " ".join(line.split())


@pytest.mark.exhaustive
def test_what_is_explained_is_what_is_known(whole):
    _, printed = whole
    explained = {rule: numbers(printed, rule)[2] for rule in WITH_CHECKS}
    layouts, steps, state = {"R01", "R04", "R06", "R07", "R08"}, {"R14", "R15", "R25", "R30"}, {"R36", "R37"}
    assert {rule for rule, count in explained.items() if count} == layouts | steps | state
    notes = [line for line in printed.splitlines() if line.startswith("note ")]
    assert len(notes) == 16 and all("For instance: " in note for note in notes)


def test_the_sample_is_the_same_every_time():
    def sample():
        return list(Scope(quick=True).take(cases.flat_cases(), 20))

    assert sample() == sample() and len(set(sample())) == 20


def test_only_the_rules_asked_for_are_shown(few):
    status, printed = spec("R33", "R10")
    assert status == 0
    assert [line[:3] for line in printed.splitlines() if line.startswith("R")] == ["R10", "R33"]


def test_a_rule_without_checks_is_no_success(monkeypatch):
    for module in (command, table):
        monkeypatch.setattr(module, "CHECKS", ())
    status, printed = spec("R17")
    assert status == 2
    assert "by the tests alone" in printed


def test_a_rule_that_does_not_exist_is_refused_by_name():
    with pytest.raises(UsageError, match=r"from R01 to R39, got '40', 'x04'"):
        spec("40", "r01", "x04")


# --- the cases ---


def test_the_parts_of_the_full_form_are_all_cases_once():
    everything = list(range(23))
    parts = [list(Scope(part=part, num_parts=4).take(everything, 2)) for part in range(4)]
    assert sorted(case for part in parts for case in part) == everything


def test_the_cases_are_every_list_of_up_to_three_shapes_at_every_world_size():
    found = {(case.shapes, case.world_size, case.keep_original) for case in cases.flat_cases()}
    for length in (1, 2, 3):
        lists = {shapes for shapes, _, _ in found if len(shapes) == length}
        assert len(lists) == len(cases.SHAPES) ** length
        assert all((shapes, size, keep) in found for shapes in lists for size in range(1, 9) for keep in (False, True))
    assert any(len(shapes) == 4 for shapes, _, _ in found)
    assert {(case.stored, case.computed) for case in cases.flat_cases() if len(case.shapes) == 3} == set(cases.PAIRS)


def test_R05_no_value_equals_a_padding_value_and_bfloat16_holds_each():
    for case in cases.flat_cases():
        numel = sum(spec.numel for spec in case.layout().params) if case.world_size == 1 else 0
        values = range(cases.FIRST_VALUE, cases.FIRST_VALUE + numel)
        assert 42 not in values and 0 not in values and values.stop <= 256


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (4, 3)])
def test_fake_ranks_are_the_ranks_that_they_say(size, rank):
    group = fake_group(size, rank)
    assert (group.size(), group.rank()) == (size, rank)
    with fake_mesh(rank, size) as mesh:
        assert (mesh.size(), mesh.get_coordinate()) in [(size, (rank,)), (size, [rank])]
    assert not torch.distributed.is_initialized()


def _shown_between_forward_and_backward(rank, world_size):
    """A weight of 5 rows and another of 8, as torch's FSDP2 shows them resharded to groups of two ranks."""
    full = []
    for rows in (5, 8):
        layer = torch.nn.Linear(1, rows, bias=False)
        with torch.no_grad():
            layer.weight.copy_(torch.arange(1.0, rows + 1).view(rows, 1))
        mesh = init_device_mesh("cpu", (world_size,))
        fully_shard(layer, mesh=mesh, reshard_after_forward=2)
        layer(torch.ones(1, 1))
        assert isinstance(layer.weight, DTensor)
        full.append(layer.weight.full_tensor().flatten().tolist())
    return full


def test_R08_on_four_real_ranks_torch_shows_the_wrong_rows_that_the_table_names(ranks):
    for uneven, even in ranks.run(4, _shown_between_forward_and_backward):
        assert even == [1, 2, 3, 4, 5, 6, 7, 8]
        assert uneven[:3] == [1, 2, 3] and uneven[3] != 4 and uneven[4] != 5


# --- what is wrong is seen ---


def shifted(layout, rank):
    """Pieces that begin one element later in the parameter than they should."""
    return tuple(
        replace(piece, param_start=piece.param_start + 1, shard_start=piece.shard_start + 1)
        for piece in layout
        if piece.numel > 1
    )


def test_a_wrong_layout_is_unexplained_with_a_case_that_reproduces_it(monkeypatch, few):
    right = FlatLayout.pieces
    monkeypatch.setattr(FlatLayout, "pieces", lambda layout, rank: shifted(right(layout, rank), rank))
    status, printed = spec("R06")
    assert status == 1
    assert numbers(printed, "R06")[3] > 0
    line = printed.partition("the first of them:\n")[2].partition("\n")[0]
    case = eval(line[line.index("FlatCase") : line.index(", rank")], {"FlatCase": cases.FlatCase})
    rank = int(line.split(", rank ")[1].split(",")[0].split(":")[0])
    assert case in cases.flat_cases() and 0 <= rank < case.world_size
    assert ": ours (" in line and ", torch (" in line


def test_a_wrong_dim_is_unexplained(monkeypatch, few):
    right = PerParamLayout.shard_shape
    monkeypatch.setattr(PerParamLayout, "shard_shape", lambda layout, i, rank: right(layout, i, rank)[::-1])
    status, printed = spec("R07")
    assert status == 1 and numbers(printed, "R07")[3] > 0


def _without_averaging(rank, world_size):
    """The gradient of a weight on one of two replicas of one shard, in torch; rank r's own is r + 1."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    with quiet():
        model = FullyShardedDataParallel(
            torch.nn.Linear(1, 1, bias=False),
            device_mesh=mesh,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        model(torch.full((1, 1), rank + 1.0)).sum().backward()
    return [param.grad.tolist() for param in model.parameters() if param.grad is not None]


def test_R14_on_two_real_replicas_of_one_shard_torch_divides_and_sums_nothing_and_the_reference_averages(ranks):
    assert ranks.run(2, _without_averaging) == [[[[0.5]]], [[[1.0]]]]
    layout = FlatLayout((ParamSpec("w", (1, 1)),), 1, keep_original=True)
    world = World(plan.plan_units([("", layout)]), MeshSpec(1, 2), {"w": np.zeros((1, 1), np.float32)})
    unit = world.units[""]
    unit.compute("forward", lambda rank, full: None)
    unit.compute("backward", lambda rank, full: {"w": np.full((1, 1), rank + 1.0, np.float32)})
    world.reduce("")
    assert world.full_grads()["w"].tolist() == [[1.5]]


def _root_reshards(right):
    return lambda *args, **options: tuple(replace(unit, reshard_after_forward=True) for unit in right(*args, **options))


def _keeps_nothing(right):
    return lambda *args, **options: tuple(replace(unit, keeps_full_unreduced=False) for unit in right(*args, **options))


def _with(**changed):
    return lambda right: lambda *args, **options: right(*args, **{**options, **changed})


def _instead(wrong):
    return lambda right: lambda *args, **options: wrong


def _all_reduce_first(right):
    def steps(*args, **options):
        found = right(*args, **options)
        return sorted(found, key=lambda step: step is not reduction.ReductionStep.ALL_REDUCE)

    return steps


def _twice(right):
    def add_grads(bucket, rank, grads):
        right(bucket, rank, grads)
        right(bucket, rank, {name: grad for name, grad in grads.items() if bucket.specs[name].aliases})

    return add_grads


def _unscaled(right):
    return lambda norm, max_norm: right(norm, max_norm) * 2


def _backwards(right):
    return lambda arrays: right(arrays[::-1])


def _always_full(right):
    return lambda layout, kind, unit: right(layout, StateKind.FULL, unit)


WRONG = {
    "the root is freed behind forward": ("R13", step_cases, "plan_units", _root_reshards),
    "every unit is freed behind forward": ("R14", step_cases, "plan_units", _root_reshards),
    "what is not reduced is freed": ("R15", step_cases, "plan_units", _keeps_nothing),
    "nothing is prefetched": ("R16", step_cases, "step_plan", _with(backward_prefetch=None, forward_prefetch=0)),
    "replicas come first": ("R28", plan, "reduction_steps", _all_reduce_first),
    "anything is adopted": ("R25", replaced, "check_replaced", _instead(None)),
    "unused means none": ("R29", unused, "missing_grad", _instead(reduction.Missing.NONE)),
    "every norm is float32": ("R30", norms, "norm_dtype", _instead("float32")),
    "clipped too little": ("R30", norms, "clip_coefficient", _unscaled),
    "shared gradients count twice": ("R31", bucket.LiveBucket, "add_grads", _twice),
    "sums begin at the last rank": ("R32", sums, "all_reduce", _backwards),
    "integers are cast": ("R35", precision, "_cast", _instead("bfloat16")),
    "wrappers stay in names": ("R36", clean_names, "canonical_name", lambda right: lambda name: name),
    "every state dict is full": ("R36", model_state, "target_of", _always_full),
    "state stays where it is": ("R37", optim_state, "overlay", _instead(())),
    "modules draw before their children": ("R38", initial, "init_plan", _with(order=Order.PRE_ORDER)),
    "parts lie as they are numbered": ("R39", model, "in_whole", lambda right: lambda piece, *_: iter([piece])),
}


@pytest.mark.parametrize(
    "wrong", [pytest.param(wrong, marks=[pytest.mark.exhaustive] * bool(i % 8)) for i, wrong in enumerate(WRONG)]
)
def test_a_wrong_core_is_unexplained(monkeypatch, few, wrong):
    rule, where, name, broken = WRONG[wrong]
    monkeypatch.setattr(where, name, broken(getattr(where, name)))
    status, printed = spec(rule)
    assert status == 1 and numbers(printed, rule)[3] > 0
    assert " stopped at " not in printed


def test_a_check_that_crashes_is_an_unexplained_case_of_each_of_its_rules(monkeypatch):
    monkeypatch.setattr(command, "CHECKS", (Check("no_such_module:at_all", ("R01", "R12"), CLOSED_FORM),))
    status, printed = spec()
    assert status == 1
    assert "no_such_module:at_all" in printed and "ModuleNotFoundError" in printed and "Traceback" not in printed
    assert "2 cases" in printed and "2 unexplained" in printed


def test_without_torch_the_other_checks_run_and_the_table_says_so(monkeypatch, few):
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [
        name for name in sys.modules if name.startswith("experiments.spec.") and "torch" in vars(sys.modules[name])
    ]:
        monkeypatch.delitem(sys.modules, name)
    assert not run.torch_installed()
    status, printed = spec("r04", "R10", "R26")
    assert status == 0
    assert "torch is not installed" in " ".join(row(printed, "R04"))
    assert numbers(printed, "R04")[0] > 0 and numbers(printed, "R04")[3] == 0
    assert numbers(printed, "R10") == ()
    assert spec("R10")[0] == 2


def test_a_tally_keeps_the_first_cases_and_one_example_a_reason():
    tally, other = Tally(), Tally()
    for i in range(5):
        tally.compare(i, i + 1, f"case {i}", "the other")
        tally.explain("known", f"case {i}")
        other.compare(i, i, "unused")
        other.explain("known too", (f"case {i}", "rank 0"))
    tally.add(other)
    assert (tally.num_cases, tally.agreed, tally.unexplained) == (20, 5, 5)
    assert tally.failures == [f"case {i}: ours {i}, the other {i + 1}" for i in range(KEPT_CASES)]
    assert tally.explained == {"known": 5, "known too": 5}
    assert tally.examples == {"known": "case 0", "known too": "case 0, rank 0"}


def test_a_check_may_only_count_the_rules_that_it_names():
    with pytest.raises(KeyError):
        Tallies(("R01",))["R02"]


def test_every_check_is_there_and_names_rules_that_exist():
    assert all(rule in TITLES for check in CHECKS for rule in check.rules)
    assert len({check.target for check in CHECKS}) == len(CHECKS)
    assert {check.against for check in CHECKS} == {TORCH, CLOSED_FORM, checks.REFERENCE}
    for check in CHECKS:
        module, _, function = check.target.partition(":")
        assert (ROOT / "experiments" / "spec" / f"{module}.py").read_text().count(f"\ndef {function}(") == 1


# --- the full form ---


@pytest.mark.exhaustive
def test_the_full_form_runs_in_processes_of_its_own():
    two = [check for check in CHECKS if check.target in ("closed_form:divide_products", "refusals:zero_dim")]
    seen = []
    found = run.run_checks(two, quick=False, progress=lambda done, total: seen.append((done, total)))
    assert found["R26"].unexplained == found["R07"].unexplained == 0
    assert found["R26"].agreed == 4096 * 6 and found["R07"].agreed > 0
    assert seen == [(0, 2), (1, 2), (2, 2)]


def test_an_interrupted_run_leaves_no_process_behind():
    code = (
        "from rich.console import Console; from experiments.spec.command import run_spec\n"
        "if __name__ == '__main__': run_spec(quick=False, rules=('R26',), console=Console())"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while len(workers := children(process.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
        for pid in (*workers, process.pid):  # as a terminal does
            os.kill(pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode != 0 and said.rstrip().endswith("KeyboardInterrupt")
    assert said.count("Traceback") == 1
    deadline = time.monotonic() + 60
    while left := [pid for pid in workers if runs(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def runs(pid):
    """Whether a process runs, and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid):
    """The processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_the_table_says_which_sides_were_compared():
    text = io.StringIO()
    tally = Tally(agreed=1234)
    table.print_table(Console(file=text, width=160), ["R04"], {"R04": tally}, CHECKS)
    assert row(text.getvalue(), "R04")[3:] == ["1,234", "1,234", "0", "0", "torch,", "closed", "form,", "reference"]


@pytest.mark.parametrize("kind", ["flat", "one flat parameter"])
def test_R12_R24_an_operation_counts_for_the_rules_that_it_exercises(kind):
    found = explore(SmallWorld(kind, MeshSpec(2), Api.FSDP1, True, False).pair(), 2)
    cases, granted = cases_of(found), found.tried - found.refused
    forbidden, lawful = [], []
    for flags in REQUESTS:
        gradients = "g" in flags and ("o" in flags or kind != "flat")
        (forbidden if gradients or {"w", "r"} <= set(flags) else lawful).append(f"summon {flags}".strip())
    assert cases["R12"] == found.num_tried == sum(found.tried[operation] for operation in OPERATIONS)
    assert cases["R17"] == granted["fail in forward"] + granted["fail in backward"] + granted["reset"]
    meddled = granted["meddle in forward"] + granted["meddle in backward"]
    assert cases["R18"] == meddled + sum(found.refused[operation] for operation in lawful)
    assert cases["R19"] == sum(granted[operation] for operation in lawful)
    assert cases["R20"] == granted["edit full"] + granted["edit piece"] + granted["exit"]
    assert cases["R21"] == granted["exit"]
    with_grads = sum(granted[operation] for operation in lawful if "g" in operation)
    assert cases["R22"] == with_grads + granted["edit grad"] + granted["zero one grad"]
    assert cases["R23"] == sum(found.tried[operation] for operation in forbidden)
    assert cases["R24"] == granted["exit"] + granted["fail in summon"]
    assert set(cases) == set(LIFECYCLE) and all(cases.values())
