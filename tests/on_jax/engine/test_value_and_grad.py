from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crossframe.errors import UsageError
from jax_backend import LossOutput, ShardedParams, per_rank, shard, unshard, value_and_grad
from tests.on_jax.helpers.small import (
    ATOL,
    EPS,
    RTOL,
    SHARDING,
    UNITS,
    WIDE,
    WORLDS,
    mesh_of_size,
    small_batch,
    small_loss,
    small_map,
    small_params,
)


def sharded_over(world_size, **kwargs):
    return shard(small_params(**kwargs), mesh_of_size(world_size), units=UNITS, param_map=small_map(), layout="flat")


def batch_of_rank(batch, rank, world_size):
    return jax.tree.map(lambda leaf: np.split(leaf, world_size)[rank], batch)


@pytest.mark.parametrize("strategy", SHARDING)
@pytest.mark.parametrize("world_size", WORLDS)
def test_R26_loss_and_gradients_are_those_of_the_mean_loss_unsharded(world_size, strategy):
    batch = small_batch()
    result = value_and_grad(small_loss, mesh_of_size(world_size), strategy=strategy)(sharded_over(world_size), batch)

    def mean_loss(params):
        return (
            sum(small_loss(params, batch_of_rank(batch, rank, world_size)) for rank in range(world_size)) / world_size
        )

    loss, grads = jax.value_and_grad(mean_loss)(jax.tree.map(jnp.asarray, small_params()))
    np.testing.assert_allclose(result.loss, loss, rtol=RTOL)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=ATOL), unshard(result.grads), grads)
    for rank in range(world_size):
        own = small_loss(small_params(), batch_of_rank(batch, rank, world_size))
        np.testing.assert_allclose(result.losses[rank], own, rtol=RTOL)
    assert isinstance(result.grads, ShardedParams)
    assert (result.state, result.aux, result.local_grads) == (None, None, None)


@pytest.mark.parametrize("dtype", dict.fromkeys(["float32", WIDE]))
def test_R14_both_strategies_give_the_same_bits(dtype):
    batch = small_batch(dtype=dtype)
    one, other = (
        value_and_grad(small_loss, mesh_of_size(3), strategy=strategy)(sharded_over(3, dtype=dtype), batch)
        for strategy in SHARDING
    )
    np.testing.assert_array_equal(one.losses, other.losses)
    jax.tree.map(np.testing.assert_array_equal, one.grads.shards, other.grads.shards)


def test_a_step_can_stand_inside_jit_and_hold_a_scan():
    def loss(params, batch):
        weights = jnp.stack([block["kernel"] for block in params["blocks"]])
        first = jnp.tanh(batch["x"] @ params["inp"]["kernel"])
        hidden, _ = jax.lax.scan(lambda h, w: (jax.nn.relu(h @ w) + h, None), first, weights)
        return jnp.mean(hidden**2)

    step = value_and_grad(loss, mesh_of_size(2))
    result = jax.jit(step)(sharded_over(2), small_batch())
    expected = jax.grad(loss)(jax.tree.map(jnp.asarray, small_params()), small_batch())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=ATOL), unshard(result.grads), expected)


def test_rng_is_folded_with_the_rank():
    def loss(params, batch, rng):
        return jnp.sum(params["inp"]["bias"]) * 0 + jax.random.uniform(rng, dtype=WIDE) + 0 * batch["x"].sum()

    key = jax.random.key(11)
    for rng in (key, jax.random.key_data(key)):
        losses = value_and_grad(loss, mesh_of_size(3))(sharded_over(3), small_batch(), rng=rng).losses
        expected = [jax.random.uniform(jax.random.fold_in(key, rank), dtype=WIDE) for rank in range(3)]
        np.testing.assert_array_equal(losses, np.array(expected))


def test_state_and_aux_are_each_ranks_own():
    def loss(params, batch, state):
        mean = batch["x"].mean(0)
        new = {"count": state["count"] + 1, "mean": 0.5 * state["mean"] + 0.5 * mean, "key": state["key"]}
        return LossOutput(small_loss(params, batch), aux={"sum": batch["x"].sum(), "first": batch["x"][0]}, state=new)

    mesh = mesh_of_size(3)
    state = per_rank({"count": jnp.int32(4), "mean": jnp.ones(3), "key": jax.random.key(0)}, mesh)
    batch = small_batch()
    result = value_and_grad(loss, mesh)(sharded_over(3), batch, state)
    np.testing.assert_array_equal(result.state["count"], [5, 5, 5])
    assert result.state["count"].dtype == jnp.int32
    assert result.aux["first"].shape == (3, 3)
    for rank in range(3):
        x = batch_of_rank(batch, rank, 3)["x"]
        # One mean and one sum of 12 numbers of order 1.
        np.testing.assert_allclose(result.state["mean"][rank], 0.5 + 0.5 * x.mean(0), rtol=45 * EPS)
        np.testing.assert_allclose(result.aux["sum"][rank], x.sum(), rtol=450 * EPS)
        np.testing.assert_array_equal(result.aux["first"][rank], x[0])
    again = value_and_grad(loss, mesh)(sharded_over(3), batch, result.state)
    np.testing.assert_array_equal(again.state["count"], [6, 6, 6])


@pytest.mark.parametrize("has_state", [True, False])
def test_state_alone_or_aux_alone_stands_beside_the_loss(has_state):
    def loss(params, batch, state=None):
        new: Any = {"state": {"n": state["n"] + 1}} if has_state else {"aux": {"n": jnp.int32(1)}}
        return LossOutput(small_loss(params, batch), **new)

    mesh = mesh_of_size(2)
    state = {"state": {"n": jnp.zeros(2, jnp.int32)}} if has_state else {}
    result = value_and_grad(loss, mesh)(sharded_over(2), small_batch(), **state)
    np.testing.assert_array_equal((result.state if has_state else result.aux)["n"], [1, 1])


def refused(match, loss=small_loss, world_size=2, args=None, state=None, rng=None, **kwargs):
    ran = []

    def watched(*inputs, **given):
        jax.debug.callback(lambda: ran.append(1))
        return loss(*inputs, **given)

    step = value_and_grad(watched, mesh_of_size(world_size), **kwargs)
    with pytest.raises(UsageError, match=match):
        step(*(args or (sharded_over(world_size), small_batch())), state, rng)
    assert not ran


def test_a_loss_that_is_no_floating_scalar_is_refused_before_it_runs():
    refused(r"floating scalar as loss, got shape \(6, 3\) and dtype " + WIDE, lambda params, batch: batch["x"])
    refused(r"floating scalar as loss, got shape \(\) and dtype int32", lambda params, batch: jnp.int32(1))
    refused(r"scalar loss, got tuple; .*LossOutput\(loss, aux", lambda params, batch: (small_loss(params, batch), 1))
    refused("scalar loss, got float", lambda params, batch: 1.0)


def test_a_state_goes_in_if_and_only_if_one_comes_out():
    state = {"n": jnp.zeros(2)}
    refused("takes a state and returned none", lambda params, batch, state: small_loss(params, batch), state=state)
    loss = lambda params, batch: LossOutput(small_loss(params, batch), state={"n": jnp.zeros(())})  # noqa: E731
    refused("returned a state and takes none; pass state=", loss)


def test_a_state_that_changes_its_form_is_refused():
    def returning(change):
        return lambda params, batch, state: LossOutput(small_loss(params, batch), state=change(state))

    kwargs: Any = {"state": {"n": jnp.zeros((2, 3))}}
    refused(r"keep its structure, with leaves \['n'\], got \[\]", returning(lambda s: {}), **kwargs)
    refused(
        rf"state leaf 'n': expected .*\(3,\), '{WIDE}'.*got .*\(4,\)", returning(lambda s: {"n": jnp.ones(4)}), **kwargs
    )
    refused("state leaf 'n': .*got .*int32", returning(lambda s: {"n": s["n"].astype("int32")}), **kwargs)


def test_arguments_that_do_not_fit_are_refused():
    batch = small_batch(7)
    refused(
        r"batch leaf 'x': expected a leading dim divisible by 2 ranks, got shape \(7, 3\)",
        args=(sharded_over(2), batch),
    )
    refused(r"batch leaf 'n': .*got shape \(\)", args=(sharded_over(2), {"n": 3}))
    refused(
        r"state leaf 'n': expected a leading rank axis of size 2, got shape \(3,\)",
        state={"n": np.ones(3)},
    )


def test_parameters_that_are_not_sharded_for_this_mesh_are_refused():
    refused("expected ShardedParams, got dict", args=(small_params(), small_batch()))
    refused("the mesh's 2 ranks, got 3", args=(sharded_over(3), small_batch()))
    sharded = sharded_over(2)
    (numel,) = sharded.shards[""].shape
    cut = ShardedParams({**sharded.shards, "": sharded.shards[""][:-2]}, sharded.tree)
    refused(rf"\{{'': \(\({numel},\), \({numel - 2},\)\)\}}", args=(cut, small_batch()))


@pytest.mark.parametrize("strategy", SHARDING)
def test_R29_unused_parameters_and_units_get_zeros(strategy):
    def loss(params, batch):
        hidden = batch["x"] @ params["inp"]["kernel"]
        return jnp.mean((hidden @ params["blocks"][0]["kernel"]) ** 2)

    mesh = mesh_of_size(3)
    result = value_and_grad(loss, mesh, strategy=strategy, local_grads=True)(sharded_over(3), small_batch())
    grads = unshard(result.grads)
    for unused in (grads["blocks"][1]["kernel"], grads["blocks"][0]["bias"], grads["out"]["kernel"]):
        np.testing.assert_array_equal(unused, np.zeros_like(unused))
    assert np.any(grads["blocks"][0]["kernel"])
    assert result.local_grads is not None and not np.any(result.local_grads.lines["blocks.1"])
