import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_backend import shard, shards_of, unshard, value_and_grad

from .small import UNITS, mesh_of_size, small_batch, small_loss, small_map, small_params

STEPS = 4


def optimizer():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.1))


def trained_unsharded(world_size):
    """The same training on one device: the mean of the ranks' mean losses is the mean over the batch."""
    params, optim = jax.tree.map(jnp.asarray, small_params()), optimizer()
    state = optim.init(params)
    for i in range(STEPS):
        grads = jax.grad(small_loss)(params, small_batch(seed=i))
        updates, state = optim.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_R05_R30_optax_trains_shards_as_it_trains_parameters(world_size):
    mesh, optim = mesh_of_size(world_size), optimizer()
    sharded = shard(small_params(), mesh, units=UNITS, param_map=small_map())
    grads_of = value_and_grad(small_loss, mesh)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train(sharded, state, batch):
        result = grads_of(sharded, batch)
        updates, state = optim.update(result.grads, state, sharded)
        return optax.apply_updates(sharded, updates), state, result.loss

    first, state = sharded, optim.init(sharded)
    for i in range(STEPS):
        sharded, state, _ = train(sharded, state, small_batch(seed=i))
    assert all(array.is_deleted() for array in first.shards.values())
    # float64: 4 steps of Adam, whose first divides by |gradient| (about 1e-3 and up here), leave 1e-12 far away.
    expected = trained_unsharded(world_size)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), unshard(sharded), expected)
    moments = state[1][0].mu
    for tree in (sharded, moments):
        for unit, layout in tree.tree.units:
            assert tree.shards[unit].sharding == first.shards[unit].sharding
            for rank in range(world_size):
                for run in layout.padding(rank):
                    assert not shards_of(tree, rank)[unit][run.start : run.stop].any()
