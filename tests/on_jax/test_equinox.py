from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from crossframe import MeshSpec
from jax_backend import LossOutput, make_mesh, per_rank, shard, summon_full_params, unshard, value_and_grad
from jax_backend.equinox import split, state_of, with_params
from tests.on_jax.helpers.small import ATOL, RTOL, WIDE


class Net(eqx.Module):
    """Two linear layers, a count of uses, and a key for noise."""

    layers: list[eqx.nn.Linear]
    count: jax.Array
    key: jax.Array
    act: Any

    def __init__(self):
        one, two, self.key = jax.random.split(jax.random.key(0), 3)
        self.layers = [eqx.nn.Linear(*size, key=key) for size, key in (((3, 4), one), ((4, 2), two))]
        self.layers = jax.tree.map(lambda a: a.astype(WIDE) if eqx.is_inexact_array(a) else a, self.layers)
        self.count = jnp.asarray(0)
        self.act = jax.nn.tanh

    def __call__(self, x):
        hidden = self.act(jax.vmap(self.layers[0])(x))
        hidden = hidden * jax.random.normal(jax.random.fold_in(self.key, self.count), hidden.shape)
        return jax.vmap(self.layers[1])(hidden)


def test_a_module_is_split_into_static_parts_parameters_and_state():
    net = Net()
    static, params, state = split(net)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(WIDE)}
    assert len(jax.tree.leaves(state)) == 2 and jax.tree.leaves(static) == [jax.nn.tanh]
    assert eqx.tree_equal(with_params(static, params, state), net)
    assert eqx.tree_equal(state_of(net), state)
    assert with_params(static, params).count is None


def test_an_equinox_model_trains_as_the_unsharded_one():
    net, mesh, rng = Net(), make_mesh(MeshSpec(2)), np.random.default_rng(0)
    batch = {"x": rng.normal(size=(8, 3)), "y": rng.normal(size=(8, 2))}
    static, params, state = split(net)

    def loss(params, batch, state):
        model = with_params(static, params, state)
        value = jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
        return LossOutput(value, state=state_of(eqx.tree_at(lambda m: m.count, model, model.count + 1)))

    sharded, states = shard(params, mesh, units=("layers.1",)), per_rank(state, mesh)
    assert [spec.name for spec in sharded.tree.layouts[""].params] == ["layers.0.weight", "layers.0.bias"]
    own = [jax.tree.map(lambda leaf, rank=rank: leaf[rank], states) for rank in range(2)]
    halves = [jax.tree.map(lambda leaf, i=i: np.split(leaf, 2)[i], batch) for i in range(2)]
    step = value_and_grad(loss, mesh)

    @jax.jit
    def plain_step(params, own):
        def mean(params):
            outputs = [loss(params, half, state) for state, half in zip(own, halves, strict=True)]
            return sum(each.loss for each in outputs) / 2, [each.state for each in outputs]

        result, grads = jax.value_and_grad(mean, has_aux=True)(params)
        return result, jax.tree.map(lambda a, b: a - 0.1 * b, params, grads)

    for _ in range(2):
        result = step(sharded, batch, states)
        sharded, states = jax.tree.map(lambda a, b: a - 0.1 * b, sharded, result.grads), result.state
        (value, own), params = plain_step(params, own)
        np.testing.assert_allclose(result.loss, value, rtol=RTOL)
    full = unshard(sharded)
    assert isinstance(full, Net)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=ATOL), full, params)
    np.testing.assert_array_equal(states.count, [2, 2])
    with summon_full_params(sharded) as summoned:
        summoned.params = eqx.tree_at(lambda m: m.layers[1].bias, summoned.params, jnp.ones(2))
    np.testing.assert_array_equal(unshard(summoned.sharded).layers[1].bias, [1, 1])
