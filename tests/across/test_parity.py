"""The same GPT trained in both frameworks: within the contract's bounds, with the planned events, faults found."""

from dataclasses import replace

import pytest

from crossframe.mesh import MeshSpec
from crossframe.plan import Strategy, plan_units, step_plan
from crossframe.trace import difference
from crossframe.verdict import Verdict, compare
from experiments.parity.settings import RunSettings
from tests.across.recorded import record_with_jax, record_with_torch

STEPS = 8


def _pair(ranks, settings, folder, fault_in=""):
    torch_settings = settings if fault_in in ("", "torch") else replace(settings, fault="")
    jax_settings = settings if fault_in in ("", "jax") else replace(settings, fault="")
    return record_with_torch(ranks, torch_settings, folder / "torch"), record_with_jax(jax_settings, folder / "jax")


@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [(2, Strategy.FULL_SHARD), (3, Strategy.FULL_SHARD), (4, Strategy.FULL_SHARD), (3, Strategy.SHARD_GRAD_OP)],
)
def test_float64_training_agrees_and_does_what_was_planned(ranks, tmp_path, world_size, strategy):
    settings = RunSettings("gpt-tiny", "float64", world_size, STEPS, strategy=strategy.value)
    a, b = _pair(ranks, settings, tmp_path)
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


def test_float32_training_differs_by_rounding(ranks, tmp_path):
    result = compare(*_pair(ranks, RunSettings("gpt-tiny", "float32", 2, STEPS), tmp_path))
    assert result.verdict is Verdict.ROUNDING, result.to_json()


@pytest.mark.parametrize(("fault_in", "dtype"), [("torch", "float32"), ("jax", "float64")])
def test_R26_summed_gradients_are_found_in_the_first_reduction(ranks, tmp_path, fault_in, dtype):
    settings = RunSettings("gpt-tiny", dtype, 2, 3, fault="sum_gradients")
    result = compare(*_pair(ranks, settings, tmp_path, fault_in)).to_json()
    assert result["verdict"] == "bug"
    where = result["first_divergence"]
    assert (where["step"], where["phase"], where["event"]) == (0, "reduce", "reduce_scatter")
    # The loss alone would not have told: AdamW does not feel a constant factor.
    assert result["max_relative_loss_difference"] < 1e-3
