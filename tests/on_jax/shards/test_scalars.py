"""Parameters without dims, such as a learned temperature, next to others."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crossframe import MeshSpec
from jax_backend import (
    apply_updates,
    load_checkpoint,
    make_mesh,
    save_checkpoint,
    scan,
    shard,
    sharded_optimizer,
    unshard,
    value_and_grad,
)

OPTIMIZERS = {
    "AdamW": lambda: optax.adamw(1e-2),
    "clipping": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9)),
}


def params() -> dict[str, Any]:
    weight = jnp.arange(15.0).reshape(5, 3) / 10
    return {"block": {"shift": jnp.asarray(0.5), "weight": weight}, "scale": jnp.asarray(2.0)}


def loss_of(params, batch):
    return jnp.mean((batch @ params["block"]["weight"] * params["scale"] - params["block"]["shift"]) ** 2)


# Gradients go by mode, updates by optimizer, and both by layout.
@pytest.mark.parametrize("layout", ["flat", "ragged", "per_param"])
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("AdamW", "shard_map"),
        ("clipping", "jit"),
        pytest.param("AdamW", "jit", marks=pytest.mark.exhaustive),
        pytest.param("clipping", "shard_map", marks=pytest.mark.exhaustive),
    ],
)
def test_scalars_train_as_on_one_device(name, mode, layout):
    mesh, optimizer = make_mesh(MeshSpec(shard=4)), OPTIMIZERS[name]()
    sharded = shard(params(), mesh, units=["block"], layout=layout)
    step, own = value_and_grad(loss_of, mesh, mode=mode), sharded_optimizer(optimizer)
    state, expected = own.init(sharded), params()
    full_state = optimizer.init(expected)

    @jax.jit
    def train(sharded: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        updates, state = own.update(step(sharded, batch).grads, state, sharded)
        return apply_updates(sharded, updates), state

    @jax.jit
    def train_unsharded(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(jax.grad(loss_of)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    for seed in range(3):
        batch = jnp.asarray(np.random.default_rng(seed).standard_normal((8, 5)))
        sharded, state = train(sharded, state, batch)
        expected, full_state = train_unsharded(expected, full_state, batch)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12, strict=True), unshard(sharded), expected)


@pytest.mark.parametrize(("source", "target"), [("per_param", "flat"), ("flat", "per_param")])
def test_checkpoints_of_scalars_load_into_another_layout(tmp_path, source, target):
    own, started = sharded_optimizer(optax.adamw(1e-2)), {}
    for layout, ranks in ((source, 4), (target, 2)):
        mesh = make_mesh(MeshSpec(shard=ranks), jax.devices()[:ranks])
        sharded = shard(params(), mesh, units=["block"], layout=layout)
        started[layout] = sharded, own.init(sharded), value_and_grad(loss_of, mesh)

    @partial(jax.jit, static_argnums=2)
    def trained(sharded: Any, state: Any, step: Any) -> tuple[Any, Any]:
        updates, state = own.update(step(sharded, jnp.ones((8, 5))).grads, state, sharded)
        return apply_updates(sharded, updates), state

    *saved, step = started[source]
    saved = trained(*saved, step)
    save_checkpoint(tmp_path / "saved", *saved)
    sharded, state, other_step = started[target]
    loaded = load_checkpoint(tmp_path / "saved", sharded, state)
    expected, found = (unshard(trained(*each)[0]) for each in ((*saved, step), (*loaded, other_step)))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12, strict=True), found, expected)


def test_stacked_scalars_are_one_a_layer():
    def loss(params: Any, batch: Any) -> Any:
        def body(x: Any, block: Any, _: Any) -> tuple[Any, None]:
            return jnp.tanh(x @ block["weight"]) * block["scale"], None

        return jnp.mean(scan(body, batch, params["blocks"])[0] ** 2)

    weight = np.random.default_rng(0).standard_normal((3, 5, 5))
    full = {"blocks": {"weight": jnp.asarray(weight), "scale": jnp.arange(1.0, 4.0)}}
    mesh, batch = make_mesh(MeshSpec(shard=4)), jnp.asarray(np.random.default_rng(1).standard_normal((8, 5)))
    result = value_and_grad(loss, mesh)(shard(full, mesh, stacked=["blocks"]), batch)
    expected = jax.grad(loss)(full, batch)
    # Gradients of size 1 are sums of 40 products, each rounded by 1.1e-16.
    close = partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-14, strict=True)
    jax.tree.map(close, unshard(result.grads), expected)
