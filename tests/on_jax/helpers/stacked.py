"""A model of stacked layers."""

import jax.numpy as jnp
import numpy as np

from jax_backend import scan
from tests.on_jax.helpers.small import wide

MODES = ("shard_map", "jit")


def stacked_loss(params, batch):
    def block(hidden, block, _):
        return hidden + jnp.tanh(hidden @ block["kernel"] + block["bias"]), hidden.sum()

    hidden, sums = scan(block, batch["x"] @ params["inp"], params["blocks"])
    return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2) + 0.01 * sums.sum()


def stacked_params(num_layers=4):
    rng = np.random.default_rng(0)
    blocks = {"kernel": 0.3 * rng.normal(size=(num_layers, 5, 5)), "bias": rng.normal(size=(num_layers, 5))}
    return wide({"blocks": blocks, "inp": rng.normal(size=(3, 5)), "out": rng.normal(size=(5, 2))})
