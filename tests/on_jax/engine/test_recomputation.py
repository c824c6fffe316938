"""Whatever a loss function contains has the same gradients whether parameters are saved or gathered again."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_backend import scan, shard, unshard, value_and_grad
from tests.on_jax.helpers.small import ATOL, RTOL, mesh_of_size, small_batch
from tests.on_jax.helpers.stacked import MODES, stacked_params


def counting(layer: Any, hidden: Any, blocks: Any, batch: Any) -> Any:
    """Integers as carry, as results and as x."""

    def body(carry: Any, own: Any, i: Any) -> Any:
        hidden, count = carry
        return (layer(hidden, own) * (1 + i), count + 1), jnp.argmax(hidden)

    (hidden, count), found = scan(body, (hidden, 0), blocks, jnp.arange(4))
    return hidden * count + found.sum()


def dropping(layer: Any, hidden: Any, blocks: Any, batch: Any) -> Any:
    """A key and integers that the body closes over."""
    key, rows = jax.random.key(3), jnp.argsort(batch["x"][:, 0])

    def body(hidden: Any, own: Any, i: Any) -> Any:
        kept = jax.random.bernoulli(jax.random.fold_in(key, i), 0.7, hidden.shape)
        return jnp.where(kept, layer(hidden, own)[rows], 0), None

    return scan(body, hidden, blocks, jnp.arange(4))[0]


def sharing(layer: Any, hidden: Any, blocks: Any, batch: Any) -> Any:
    """A float that the body closes over and that is differentiated, and results of each layer."""
    scale = jnp.tanh(hidden).mean()
    hidden, found = scan(lambda x, own, _: (scale * layer(x, own), {"mean": x.mean(), "none": None}), hidden, blocks)
    return hidden * found["mean"].sum()


def branching(layer: Any, hidden: Any, blocks: Any, batch: Any) -> Any:
    """A condition, a loop and a jitted function inside of the body."""

    def body(hidden: Any, own: Any, _: Any) -> Any:
        hidden = jax.lax.cond(hidden[0, 0] > 0, lambda x: layer(x, own), lambda x: x - layer(x, own), hidden)
        hidden, _ = jax.lax.scan(lambda x, row: (x + jnp.tanh(row * x), None), hidden, own["kernel"])
        return jax.jit(lambda x, kernel: x @ kernel.T.reshape(kernel.shape))(hidden, own["kernel"]), None

    return scan(body, hidden, blocks)[0]


def checkpointed(layer: Any, hidden: Any, blocks: Any, batch: Any) -> Any:
    """jax.checkpoint around the body, and inside of another one."""
    body = jax.checkpoint(lambda hidden, own, _: (jax.checkpoint(layer)(hidden, own), None))
    return scan(body, hidden, blocks, unroll=2, reverse=True)[0]


def penalised(layer: Any, hidden: Any, blocks: Any, batch: Any) -> Any:
    """A gradient with respect to an activation."""
    inner = jax.grad(lambda x: jnp.tanh(x @ x.T).sum())(hidden)
    return scan(lambda x, own, _: (layer(x, own), None), hidden, blocks)[0] * jnp.sum(inner**2)


def plain(layer: Any, hidden: Any, blocks: Any, batch: Any) -> Any:
    return scan(lambda x, own, _: (layer(x, own), None), hidden, blocks)[0]


def constant(layer: Any, hidden: Any, blocks: Any, batch: Any) -> Any:
    """Arrays of numbers in jitted functions, and a view that is made of one."""
    table = np.linspace(0.5, 1.5, 25).reshape(5, 5)
    first = jax.jit(lambda x: (x @ jnp.asarray(table).T, jnp.asarray(table)[1:3].reshape(10)[:5] * x))

    def body(hidden: Any, own: Any, _: Any) -> Any:
        product, scaled = first(layer(hidden, own))
        return jax.jit(lambda x, y: jnp.sin(x) * jnp.broadcast_to(y, x.shape))(product, table[0]) + scaled, None

    return scan(body, sum(first(hidden)), blocks)[0]


LOSSES = (plain, constant, counting, dropping, sharing, branching, checkpointed, penalised)


def loss_of(through: Any, params: Any, batch: Any) -> Any:
    def layer(hidden: Any, own: Any) -> Any:
        return jnp.tanh(hidden @ own["kernel"] + own["bias"])

    @jax.jit
    def first(inp: Any, x: Any) -> Any:
        return jax.nn.relu(jnp.einsum("of,bf->bo", inp.T, x)), inp.T[0].sum()

    hidden, other = first(params["inp"], batch["x"])
    hidden = jax.checkpoint(lambda x: jnp.sin(x) * params["inp"].sum())(hidden) + other
    hidden = through(layer, hidden, params["blocks"], batch)
    return jnp.mean((jnp.exp(-(hidden**2)) @ params["out"] - batch["y"]) ** 2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("through", LOSSES)
def test_gradients_are_those_of_saved_parameters(through, mode):
    mesh, results = mesh_of_size(2), []
    for reshards in (True, False):
        sharded = shard(stacked_params(), mesh, stacked=("blocks",), reshard_after_forward=reshards)
        step = value_and_grad(partial(loss_of, through), mesh, mode=mode)
        found = step(sharded, small_batch())
        if reshards:
            again = jax.jit(step)(sharded, small_batch())
            assert all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(again)))
        results.append((found.loss, unshard(found.grads)))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        assert np.any(b)
        np.testing.assert_allclose(a, b, rtol=RTOL, atol=ATOL)
