"""A small nnx module, and the map of its names."""

import numpy as np
from flax import nnx

from crossframe.param_map import MapEntry, ParamMap
from tests.on_jax.helpers.small import WIDE


class Net(nnx.Module):
    """Linear, batch norm, dropout, and a list of one block."""

    def __init__(self, rngs):
        self.first = nnx.Linear(3, 4, rngs=rngs, param_dtype=WIDE)
        self.norm = nnx.BatchNorm(4, rngs=rngs, param_dtype=WIDE)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(4, 2, rngs=rngs, param_dtype=WIDE)])

    def __call__(self, x):
        return self.blocks[0](self.drop(nnx.tanh(self.norm(self.first(x)))))


def net_map():
    return ParamMap(
        (
            MapEntry("first.weight", "first.kernel", "i o -> o i"),
            MapEntry("first.bias", "first.bias"),
            MapEntry("norm.weight", "norm.scale"),
            MapEntry("norm.bias", "norm.bias"),
            MapEntry("blocks.0.weight", "blocks.0.kernel", "i o -> o i"),
            MapEntry("blocks.0.bias", "blocks.0.bias"),
        )
    )


def batch():
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(8, 3)), "y": rng.normal(size=(8, 2))}
