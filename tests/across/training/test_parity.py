"""The same models trained in both frameworks: within the contract's bounds, with the planned events, faults found."""

# pyright: reportOptionalMemberAccess=false, reportOptionalOperand=false, reportOperatorIssue=false, reportOptionalSubscript=false
import os
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from crossframe.errors import UsageError
from crossframe.mesh import MeshSpec
from crossframe.plan import Strategy, plan_units, step_plan
from crossframe.recording import Recording
from crossframe.recording.event_format import BACKWARD, PARAMETERS, REDUCE, UPDATE
from crossframe.recording.program import PROGRAM
from crossframe.report.traces import trace_of
from crossframe.strategy import Sync
from crossframe.trace import COLLECTIVES, difference
from crossframe.verdict import Verdict, compare
from experiments.cli.commands import app
from experiments.parity.grid import cells
from experiments.parity.settings import RunSettings
from tests.across.helpers.recorded import record_with_jax, record_with_torch
from tests.conftest import EXHAUSTIVE

STEPS = 8
# JAX compiles a step that records local gradients, and from the third step on one that does not.
SHORT = STEPS if os.environ.get(EXHAUSTIVE) else 2


@pytest.fixture(scope="module")
def recorded(ranks, tmp_path_factory):
    """A recording by a framework, made when it is first asked for."""
    made = {}

    def of(framework, settings):
        if (framework, settings) not in made:
            folder = tmp_path_factory.mktemp("recorded") / framework
            torch = framework == "torch"
            made[framework, settings] = (
                record_with_torch(ranks, settings, folder) if torch else record_with_jax(settings, folder)
            )
        return made[framework, settings]

    return of


# Three ranks divide nothing evenly. Two ranks train in float32 below, and four on the hybrid mesh.
WORLDS = [
    (3, Strategy.FULL_SHARD, STEPS),
    (3, Strategy.SHARD_GRAD_OP, STEPS),
    (2, Strategy.FULL_SHARD, STEPS),
    (4, Strategy.FULL_SHARD, STEPS),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("world_size", "strategy", "steps"), WORLDS)
def test_float64_training_agrees_and_does_what_was_planned(recorded, world_size, strategy, steps):
    settings = RunSettings("gpt-tiny", "float64", world_size, steps, strategy=strategy.value)
    a, b = recorded("torch", settings), recorded("jax", settings)
    result = compare(a, b).to_json()
    assert result["verdict"] == "rounding", result
    # The contract: float64 losses agree to 1e-12 at every step, parameters to 1e-11.
    assert 0 < result["max_relative_loss_difference"] <= 1e-12
    assert 0 < result["max_relative_parameter_difference"] <= 1e-11
    assert result["zero_gradient_parameters"] == [f"blocks.{i}.attention.key.bias" for i in range(2)]
    for rank in range(world_size):
        plan = step_plan(plan_units(a.manifest.units, strategy), MeshSpec(shard=world_size), rank)
        assert difference(plan, a.collectives(0, rank), ordered=True, kinds=COLLECTIVES) == []
        assert difference(plan, b.collectives(0, rank), ordered=False, kinds=COLLECTIVES) == []


@pytest.mark.exhaustive
def test_a_hybrid_mesh_with_batch_norm_momentum_clipping_and_microbatches_agrees(recorded):
    """What the GPT's cells have not, in one: each rank's own statistics go through two microbatches of a step."""
    settings = RunSettings(
        "conv", "float64", 4, SHORT, batch_size=3, learning_rate=0.1, strategy=Strategy.HYBRID_SHARD.value, mesh="2x2",
        optimizer="sgd", clip=0.2, accumulate=2,
    )  # fmt: skip
    a, b = recorded("torch", settings), recorded("jax", settings)
    result = compare(a, b).to_json()
    assert result["verdict"] == "rounding", result
    assert 0 < result["max_relative_parameter_difference"] <= 1e-11
    # Batch norm subtracts them again.
    assert result["zero_gradient_parameters"] == ["blocks.0.conv.bias", "blocks.1.conv.bias"]
    grads = [a.full(REDUCE, 0, name) for name in a.manifest.params]
    norm = np.sqrt(sum((grad**2).sum() for grad in grads))
    assert norm > 2 * settings.clip  # or nothing was clipped
    # The first step of momentum is one of gradient descent: clipped, with weights decayed.
    for recording in (a, b):
        before, after = (recording.full(phase, 0, "head.weight") for phase in (PARAMETERS, UPDATE))
        clipped = recording.full(REDUCE, 0, "head.weight") * settings.clip / (norm + 1e-6)
        np.testing.assert_allclose(after, before - 0.1 * (clipped + 0.01 * before), rtol=0, atol=1e-14)
    assert trace_of("torch", a, "jax", b)["equal"]
    units = plan_units(a.manifest.units, Strategy.HYBRID_SHARD)
    for rank in range(4):
        plan = step_plan(units, MeshSpec(shard=2, replicate=2), rank, microbatches=2, sync=Sync.LAST)
        assert difference(plan, a.collectives(0, rank), ordered=True, kinds=COLLECTIVES) == []
        assert difference(plan, b.collectives(0, rank), ordered=False, kinds=COLLECTIVES) == []


@pytest.mark.exhaustive
def test_bfloat16_and_top_k_routing_lie_within_what_perturbed_runs_of_torch_reach(ranks, tmp_path):
    """Parameters stored in float32, computed with in bfloat16: no bound known beforehand says anything of it."""
    settings = RunSettings("moe", "bfloat16", steps=2)
    for run, path in settings.runs(tmp_path / "torch", 3):
        record_with_torch(ranks, run, path)
    a, b = Recording.open(tmp_path / "torch"), record_with_jax(settings, tmp_path / "jax")
    assert {spec.dtype for spec in a.manifest.params.values()} == {"float32"}
    assert a.ranges(BACKWARD, 0, "head.weight")[0].dtype == b.ranges(BACKWARD, 0, "head.weight")[0].dtype == "bfloat16"
    found = compare(a, b)
    assert found.verdict is Verdict.ROUNDING, found.reason
    assert 0 < found.limit_used < 1
    # Far more than float32 rounds by, and yet a gradient that is not averaged is seen.
    assert found.max_relative_loss_difference > 1e-5
    assert trace_of("torch", a, "jax", b)["equal"]
    record_with_torch(ranks, replace(settings, fault="sum_gradients"), tmp_path / "faulty")
    faulty = compare(a, Recording.open(tmp_path / "faulty"))
    assert faulty.verdict is Verdict.BUG
    first = faulty.first_divergence
    assert (first.step, first.phase, first.event) == (0, "reduce", "reduce_scatter"), faulty.reason


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mesh": "2"}, r"mesh: expected two numbers above 0, as in 2x2, got '2'"),
        ({"mesh": "2x3", "strategy": "hybrid_shard"}, "mesh: 2x3 has 6 ranks, and world-size says 2"),
        ({"mesh": "1x2"}, "a mesh and a hybrid strategy need each other"),
        ({"strategy": "hybrid_shard"}, "a mesh and a hybrid strategy need each other"),
        ({"optimizer": "lion"}, "optimizer: expected one of adamw, sgd, got 'lion'"),
        ({"clip": 0.0}, "clip: expected a number above 0"),
        ({"accumulate": 0}, "accumulate: expected an integer of at least 1, got 0"),
    ],
)
def test_runs_that_are_none_are_refused_by_name(changed, message):
    with pytest.raises(UsageError, match=message):
        RunSettings("mlp", **changed)


def test_the_command_that_makes_a_run_again_has_its_windows():
    arguments = RunSettings("mlp", windows=((2, 3), (5, 9))).arguments("torch")
    assert arguments[:3] == ["train", "torch", "mlp"]
    assert arguments[arguments.index("--window") :][:4] == ["--window", "2:3", "--window", "5:9"]


@pytest.mark.parametrize("perturbed_runs", [1, -1])
def test_a_number_of_perturbed_runs_that_says_nothing_is_refused(perturbed_runs, tmp_path):
    with pytest.raises(UsageError, match="perturbed-runs: expected 0, or 2 and more"):
        RunSettings("mlp").runs(tmp_path, perturbed_runs)


def test_the_grid_has_each_combination_once():
    found = cells((), (), (), (), 200)
    assert len(found) == len(set(found)) == 5 * 9 * 2
    assert {(run.spec.replicate, run.spec.shard) for run in found} == {(1, 1), (1, 2), (1, 3), (1, 4), (2, 2)}
    (one,) = cells(("mlp",), ("2x2",), ("hybrid_shard_zero2",), ("sgd",), 7)
    assert (one.steps, one.clip, one.accumulate, one.optimizer) == (7, 0.5, 2, "sgd")
    with pytest.raises(UsageError, match="ranks: expected among 1, 2, 3, 4, 2x2, got 5"):
        cells((), ("5",), (), (), 1)
    with pytest.raises(UsageError, match="no cell is left"):
        cells((), ("2",), ("hybrid_shard",), (), 1)


def test_the_grids_command_refuses_what_it_has_not():
    result = CliRunner().invoke(app, ["grid", "--ranks", "5"])
    assert result.exit_code == 2 and "ranks: expected among 1, 2, 3, 4, 2x2, got 5" in " ".join(result.output.split())


@pytest.mark.exhaustive
def test_the_grids_command_prints_a_line_a_cell_and_writes_it(tmp_path):
    output = tmp_path / "new" / "grid.md"
    arguments = [
        "grid",
        "--model",
        "mlp",
        "--ranks",
        "2",
        "--optimizer",
        "sgd",
        "--steps",
        "3",
        "--output",
        str(output),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    said, written = result.output.splitlines(), output.read_text().splitlines()
    assert written[0] == "2 of 2 cells, 3 steps each, in float64; the limit is 1e-11." and said[:4] == written[2:]
    assert written[4].startswith("| mlp | 2 | full_shard | sgd |  | 1 | ") and "over" not in result.output.replace(
        "over 1e-11", ""
    )
    assert written[5].startswith("| mlp | 2 | shard_grad_op | sgd | 0.5 | 2 | ")


@pytest.mark.exhaustive
def test_float32_training_differs_by_rounding(recorded):
    settings = RunSettings("gpt-tiny", "float32", 2, SHORT)
    result = compare(recorded("torch", settings), recorded("jax", settings))
    assert result.verdict is Verdict.ROUNDING, result.to_json()


@pytest.mark.exhaustive
def test_a_changed_function_is_told_from_rounding_by_bits(recorded):
    """A GELU by erf instead of by tanh differs by less than float32's bound."""
    settings = RunSettings("gpt-tiny", "float32", 2, SHORT)
    found = compare(recorded("torch", settings), recorded("torch", replace(settings, fault="gelu_by_erf")))
    assert found.verdict is Verdict.DIFFERENT, found.reason
    assert (found.first_divergence.step, found.first_divergence.phase) == (0, "forward")
    stated = recorded("jax", settings).manifest.settings[PROGRAM]
    assert stated["device"] == "cpu" and stated["compiled"]


# With the fault in JAX in float64: test_faults, besides.
SUMMED = [("torch", "float32"), *([("jax", "float64")] if os.environ.get(EXHAUSTIVE) else [])]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("fault_in", "dtype"), SUMMED)
def test_R26_summed_gradients_are_found_in_the_first_reduction(recorded, fault_in, dtype):
    settings = RunSettings("gpt-tiny", dtype, 2, SHORT)
    of = dict.fromkeys(("torch", "jax"), settings)
    of[fault_in] = replace(settings, fault="sum_gradients")
    result = compare(*(recorded(framework, some) for framework, some in of.items())).to_json()
    assert result["verdict"] == "bug"
    where = result["first_divergence"]
    assert (where["step"], where["phase"], where["event"]) == (0, "reduce", "reduce_scatter")
    # The loss alone would not have told: AdamW does not feel a constant factor.
    assert result["max_relative_loss_difference"] < 1e-3
