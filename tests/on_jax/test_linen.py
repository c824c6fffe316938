import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

from crossframe import MeshSpec
from jax_backend import LossOutput, make_mesh, per_rank, shard, summon_full_params, unshard, value_and_grad
from jax_backend.linen import apply, split, with_params
from tests.on_jax.helpers.small import ATOL, RTOL, WIDE


class Net(linen.Module):
    """Linear, batch norm, linear."""

    @linen.compact
    def __call__(self, x):
        x = linen.Dense(4, param_dtype=WIDE)(x)
        x = linen.BatchNorm(use_running_average=False, param_dtype=WIDE)(x)
        return linen.Dense(2, param_dtype=WIDE)(jnp.tanh(x))


def batch_of():
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(8, 3)), "y": rng.normal(size=(8, 2))}


def test_a_linen_model_trains_as_the_unsharded_one_with_each_ranks_own_statistics():
    net, batch, mesh = Net(), batch_of(), make_mesh(MeshSpec(2))
    variables = jax.tree.map(lambda leaf: leaf.astype(WIDE), jax.jit(net.init)(jax.random.key(0), batch["x"]))
    params, state = split(variables)
    assert set(state) == {"batch_stats"} and with_params(params, state) == variables

    def loss(params, batch, state):
        out, state = apply(net, params, state, batch["x"])
        return LossOutput(jnp.mean((out - batch["y"]) ** 2), state=state)

    sharded, states = shard(params, mesh, units=("Dense_1",)), per_rank(state, mesh)
    step = value_and_grad(loss, mesh)
    halves = [jax.tree.map(lambda leaf, i=i: np.split(leaf, 2)[i], batch) for i in range(2)]
    plain = [state, state]

    @jax.jit
    def plain_step(params, plain):
        def mean(params):
            outputs = [loss(params, half, state) for state, half in zip(plain, halves, strict=True)]
            return sum(each.loss for each in outputs) / 2, [each.state for each in outputs]

        result, grads = jax.value_and_grad(mean, has_aux=True)(params)
        return result, jax.tree.map(lambda a, b: a - 0.1 * b, params, grads)

    for _ in range(2):
        result = step(sharded, batch, states)
        sharded, states = jax.tree.map(lambda a, b: a - 0.1 * b, sharded, result.grads), result.state
        (value, plain), params = plain_step(params, plain)
        np.testing.assert_allclose(result.loss, value, rtol=RTOL)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=ATOL), unshard(sharded), params)
    for rank in range(2):
        own = jax.tree.map(lambda leaf, rank=rank: leaf[rank], states)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=ATOL), own, plain[rank])
    assert not np.allclose(
        states["batch_stats"]["BatchNorm_0"]["mean"][0], plain[1]["batch_stats"]["BatchNorm_0"]["mean"]
    )
    with summon_full_params(sharded, unit="Dense_1") as summoned:
        summoned.params["Dense_1"]["bias"] += 1.0
    np.testing.assert_array_equal(unshard(summoned.sharded)["Dense_1"]["bias"], unshard(sharded)["Dense_1"]["bias"] + 1)


def test_a_linen_model_without_state_has_an_empty_one():
    net, x = linen.Dense(2), np.ones((1, 3), np.float32)
    params, state = split(net.init(jax.random.key(0), x))
    out, after = apply(net, params, state, x)
    assert state == after == {}
    np.testing.assert_array_equal(out, net.apply({"params": params}, x))


class Counts(linen.Module):
    """Counts its uses, in a collection of its own."""

    @linen.compact
    def __call__(self, x):
        count = self.variable("counts", "uses", lambda: jnp.asarray(0))
        kept = self.variable("kept", "one", lambda: jnp.asarray(1))
        count.value += kept.value
        return x


def test_every_collection_of_a_linen_model_may_change():
    state = {"counts": {"uses": jnp.asarray(4)}, "kept": {"one": jnp.asarray(1)}}
    out, after = apply(Counts(), {}, state, 2.0)
    assert out == 2.0 and after == {"counts": {"uses": 5}, "kept": {"one": 1}}
