from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crossframe import MeshSpec
from crossframe.plan import plan_units, step_plan
from crossframe.strategy import Strategy
from crossframe.trace import ALL_GATHER, ALL_REDUCE, COLLECTIVES, REDUCE_SCATTER, collectives, difference
from jax_backend import shard, trace_of, value_and_grad
from jax_backend.engine import _gather as gather
from tests.on_jax.helpers.small import (
    ITEMSIZE,
    SHARDING,
    UNITS,
    WIDE,
    WORLDS,
    mesh_of_size,
    saved_for_backward,
    small_batch,
    small_loss,
    small_map,
    small_params,
    wide,
)


def sharded_over(world_size, *, layout="flat", **kwargs):
    return shard(small_params(**kwargs), mesh_of_size(world_size), units=UNITS, param_map=small_map(), layout=layout)


def count(jaxpr_text, primitive):
    """How often a primitive stands in a jaxpr as printed: nothing of jax_backend takes part in this."""
    return jaxpr_text.count(f" = {primitive}[")


@pytest.mark.parametrize("dtype", dict.fromkeys(["float32", WIDE]))
@pytest.mark.parametrize("strategy", SHARDING)
@pytest.mark.parametrize("world_size", WORLDS)
def test_R13_R14_the_trace_of_a_step_is_the_plan(world_size, strategy, dtype):
    sharded, mesh = sharded_over(world_size, dtype=dtype), mesh_of_size(world_size)
    step = value_and_grad(small_loss, mesh, strategy=strategy)
    events = trace_of(step, sharded, small_batch(dtype=dtype), mesh=mesh)
    plan = collectives(step_plan(plan_units(sharded.tree.units, strategy), MeshSpec(world_size)))
    assert len(plan) == (0 if world_size == 1 else 8 if strategy is Strategy.FULL_SHARD else 6)
    assert difference(plan, events, ordered=False, kinds=COLLECTIVES) == []


@pytest.mark.parametrize("strategy", SHARDING)
def test_R14_backward_gathers_again_the_parameters_that_it_reads_in_per_param(strategy):
    sharded, mesh = sharded_over(2, layout="per_param"), mesh_of_size(2)
    events = trace_of(value_and_grad(small_loss, mesh, strategy=strategy), sharded, small_batch(), mesh=mesh)
    plan = collectives(step_plan(plan_units(sharded.tree.units, strategy), MeshSpec(2)))
    assert Counter((e.kind, e.unit, e.phase) for e in plan) == Counter((e.kind, e.unit, e.phase) for e in events)
    again = {e.unit: e.num_bytes for e in events if (e.kind, e.phase) == (ALL_GATHER, "backward")}
    # Rows of (5, 5) kernels in three a rank; no bias.
    assert again == ({"blocks.0": 30 * ITEMSIZE, "blocks.1": 30 * ITEMSIZE} if strategy is Strategy.FULL_SHARD else {})
    rest = [
        [e for e in each if e.unit not in again or e.phase == "forward" or e.kind != ALL_GATHER]
        for each in (plan, events)
    ]
    assert difference(*rest, ordered=False, kinds=COLLECTIVES) == []


@pytest.mark.parametrize("strategy", SHARDING)
def test_R14_the_jaxpr_gathers_again_exactly_when_the_strategy_reshards(strategy):
    step = value_and_grad(small_loss, mesh_of_size(2), strategy=strategy)
    text = str(jax.make_jaxpr(step)(sharded_over(2), small_batch()))
    resharding = strategy is Strategy.FULL_SHARD
    assert count(text, "all_gather") == (5 if resharding else 3)
    assert count(text, "reduce_scatter") == 3
    assert count(text, "psum") == 0
    assert ("optimization_barrier" in text) == resharding


def test_R14_no_full_parameter_of_a_resharded_unit_is_saved_but_activations_are():
    step = value_and_grad(small_loss, mesh_of_size(2))
    shapes = saved_for_backward(step, sharded_over(2), small_batch(14))
    # 7 samples a rank: no activation has the shape of a kernel, (5, 5), nor of a gathered unit, (34,) and (30,).
    assert (7, 5) in shapes
    assert not {(5, 5), (30,)} & set(shapes)


def test_R14_scans_jits_and_casts_in_the_loss_keep_no_full_parameter_either():
    def loss(params, batch):
        hidden = jnp.tanh(batch["x"] @ params["inp"]["kernel"]).astype(jnp.float32)
        weights = jnp.stack([block["kernel"] for block in params["blocks"]]).astype(jnp.float32)
        hidden, _ = jax.lax.scan(lambda h, w: (jax.nn.gelu(h @ w), None), hidden, weights)
        q, k = jnp.split(jnp.concatenate([b["kernel"].T for b in params["blocks"]], axis=1), 2, axis=1)
        return jnp.mean((hidden @ q @ k) ** 2)

    mesh = mesh_of_size(2)
    args = (sharded_over(2), small_batch(14))
    step = value_and_grad(loss, mesh)
    events = trace_of(step, *args, mesh=mesh)
    assert sum(event.kind == ALL_GATHER and event.phase == "backward" for event in events) == 2
    assert not {(5, 5), (30,), (2, 5, 5), (5, 10)} & set(saved_for_backward(step, *args))


def test_a_unit_whose_values_backward_does_not_need_is_not_gathered_again():
    params = wide({"a": {"w": np.ones(4)}, "b": {"w": np.ones(4)}})
    mesh = mesh_of_size(2)
    step = value_and_grad(lambda p, x: jnp.sum(jnp.tanh(x * p["a"]["w"] + p["b"]["w"])), mesh)
    events = trace_of(step, shard(params, mesh, units=("a", "b")), np.ones((2, 4)), mesh=mesh)
    assert [event.unit for event in events if event.kind == ALL_GATHER and event.phase == "backward"] == []


def test_a_trace_counts_scans_and_shows_the_loss_functions_own_collectives():
    def loss(params, batch):
        total, _ = jax.lax.scan(lambda c, x: (c + jax.lax.psum(x, "shard").sum(), None), 0.0, batch["x"])
        return total * params["inp"]["bias"].sum()

    mesh = mesh_of_size(2)
    step = value_and_grad(loss, mesh, strategy=Strategy.SHARD_GRAD_OP)
    events = trace_of(step, sharded_over(2), small_batch(8), mesh=mesh)
    own = [event for event in events if event.kind == ALL_REDUCE]
    assert len(own) == 4
    assert {(event.unit, event.phase, event.num_bytes) for event in own} == {("<loss_fn>", "forward", 3 * ITEMSIZE)}


def test_a_trace_sees_what_was_issued_not_what_was_meant(monkeypatch):
    # A reduction that forgets to reduce, and a gather that runs twice.
    sharded, mesh = sharded_over(2), mesh_of_size(2)
    plan = step_plan(plan_units(sharded.tree.units, Strategy.SHARD_GRAD_OP), MeshSpec(2))
    real = gather.all_gather
    monkeypatch.setattr(gather, "reduce_scatter", lambda buffer, unit, mesh, dim: buffer[: buffer.shape[0] // 2])
    monkeypatch.setattr(gather, "all_gather", lambda array, unit, mesh, dim: real(array, unit) + real(array, unit))
    step = value_and_grad(small_loss, mesh, strategy=Strategy.SHARD_GRAD_OP)
    lines = difference(plan, trace_of(step, sharded, small_batch(), mesh=mesh), ordered=False, kinds=COLLECTIVES)
    assert sum(line.startswith("missing 1 x") and REDUCE_SCATTER in line for line in lines) == 3
    assert sum(line.startswith("unexpected 1 x") and ALL_GATHER in line for line in lines) == 3
