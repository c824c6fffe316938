"""The same GPT trained in both frameworks: within the contract's bounds, with the planned events, faults found."""

import os
from dataclasses import replace

import pytest

from crossframe.mesh import MeshSpec
from crossframe.plan import Strategy, plan_units, step_plan
from crossframe.trace import difference
from crossframe.verdict import Verdict, compare
from experiments.parity.settings import RunSettings
from tests.across.recorded import record_with_jax, record_with_torch
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


@pytest.mark.parametrize(
    ("world_size", "strategy", "steps"),
    [
        (2, Strategy.FULL_SHARD, SHORT),
        (3, Strategy.FULL_SHARD, STEPS),
        (4, Strategy.FULL_SHARD, SHORT),
        (3, Strategy.SHARD_GRAD_OP, SHORT),
    ],
)
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
        assert difference(plan, a.collectives(0, rank), ordered=True) == []
        assert difference(plan, b.collectives(0, rank), ordered=False) == []


def test_float32_training_differs_by_rounding(recorded):
    settings = RunSettings("gpt-tiny", "float32", 2, STEPS)
    result = compare(recorded("torch", settings), recorded("jax", settings))
    assert result.verdict is Verdict.ROUNDING, result.to_json()


@pytest.mark.parametrize(("fault_in", "dtype", "steps"), [("torch", "float32", STEPS), ("jax", "float64", SHORT)])
def test_R26_summed_gradients_are_found_in_the_first_reduction(recorded, fault_in, dtype, steps):
    settings = RunSettings("gpt-tiny", dtype, 2, steps)
    of = dict.fromkeys(("torch", "jax"), settings)
    of[fault_in] = replace(settings, fault="sum_gradients")
    result = compare(*(recorded(framework, some) for framework, some in of.items())).to_json()
    assert result["verdict"] == "bug"
    where = result["first_divergence"]
    assert (where["step"], where["phase"], where["event"]) == (0, "reduce", "reduce_scatter")
    # The loss alone would not have told: AdamW does not feel a constant factor.
    assert result["max_relative_loss_difference"] < 1e-3
