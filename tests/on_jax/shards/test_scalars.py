"""Parameters without dims, such as a learned temperature, next to others."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crossframe import MeshSpec
from crossframe.errors import LayoutError
from jax_backend import apply_updates, make_mesh, shard, sharded_optimizer, unshard, value_and_grad

OPTIMIZERS = {
    "AdamW": lambda: optax.adamw(1e-2),
    "clipping": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9)),
}


def params() -> dict[str, Any]:
    weight = jnp.arange(15.0).reshape(5, 3) / 10
    return {"block": {"shift": jnp.asarray(0.5), "weight": weight}, "scale": jnp.asarray(2.0)}


def loss_of(params, batch):
    return jnp.mean((batch @ params["block"]["weight"] * params["scale"] - params["block"]["shift"]) ** 2)


@pytest.mark.parametrize("layout", ["flat", "ragged"])
@pytest.mark.parametrize("mode", ["shard_map", "jit"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scalars_in_lines_train_as_on_one_device(name, mode, layout):
    mesh, optimizer = make_mesh(MeshSpec(shard=4)), OPTIMIZERS[name]()
    sharded = shard(params(), mesh, units=["block"], layout=layout)
    step, own = value_and_grad(loss_of, mesh, mode=mode), sharded_optimizer(optimizer)
    state, expected = own.init(sharded), params()
    full_state = optimizer.init(expected)
    for seed in range(3):
        batch = jnp.asarray(np.random.default_rng(seed).standard_normal((8, 5)))
        updates, state = own.update(step(sharded, batch).grads, state, sharded)
        sharded = apply_updates(sharded, updates)
        grads = jax.grad(loss_of)(expected, batch)
        updates, full_state = optimizer.update(grads, full_state, expected)
        expected = optax.apply_updates(expected, updates)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12, strict=True), unshard(sharded), expected)


def test_R07_scalars_are_refused_where_each_parameter_is_sharded_by_itself():
    with pytest.raises(LayoutError, match=r"\['scale'\] have no dims.*shape \(1,\), or shard by layout='flat'"):
        shard(params(), make_mesh(MeshSpec(shard=4)), units=["block"])
