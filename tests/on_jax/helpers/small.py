"""A small model for the tests: uneven sizes, three units, kernels that stand transposed to torch's."""

# pyright: reportAttributeAccessIssue=false

import os

import jax
import jax.numpy as jnp
import numpy as np

from crossframe import MeshSpec
from crossframe.dtypes import numpy_dtype
from crossframe.param_map import MapEntry, ParamMap
from crossframe.strategy import Strategy
from jax_backend import make_mesh
from tests.conftest import EXHAUSTIVE


def widest():
    """The widest dtype that JAX has by now."""
    return "float64" if jax.config.jax_enable_x64 else "float32"


WIDE = widest()
"""The widest dtype that JAX has in this run. The tests are run with jax_enable_x64, and without it, as JAX's users have it."""
EPS = float(np.finfo(WIDE).eps)
ITEMSIZE = numpy_dtype(WIDE).itemsize
ATOL = RTOL = 4500 * EPS
"""What rounding may reach of values of order 1: some hundred roundings, each of half an eps, stay far below it, and a wrong
factor does not. 1e-12 in float64, 5e-4 in float32."""

UNITS = ("blocks.0", "blocks.1")
WORLDS = (1, 2, 3, 4) if os.environ.get(EXHAUSTIVE) else (1, 3)
"""Nothing is sharded on one rank, and unevenly on three. Most other tests have two."""
SHARDING = (Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP)
SIZES = {"inp": (3, 5), "blocks.0": (5, 5), "blocks.1": (5, 5), "out": (5, 2)}


def wide(tree):
    """The same pytree, its float64 arrays cast to the widest dtype of this run: JAX without float64 refuses such parameters."""
    return jax.tree.map(lambda leaf: leaf.astype(WIDE) if getattr(leaf, "dtype", None) == np.float64 else leaf, tree)


def mesh_of_size(num_ranks):
    return make_mesh(MeshSpec(num_ranks))


def small_map():
    """Torch's order and names: weight before bias, weight of shape (out, in)."""
    entries = []
    for module in SIZES:
        entries += [
            MapEntry(f"{module}.weight", f"{module}.kernel", "i o -> o i"),
            MapEntry(f"{module}.bias", f"{module}.bias"),
        ]
    return ParamMap(tuple(entries))


def small_params(dtype=None, seed=0, draw=None):
    """{"blocks": [...], "inp": ..., "out": ...}; jax's own order of leaves is not torch's."""
    rng = np.random.default_rng(seed)
    draw = draw or (lambda shape: rng.normal(size=shape))
    dtype = numpy_dtype(dtype or widest())
    modules = {
        name: {"kernel": draw(size).astype(dtype), "bias": draw(size[1:]).astype(dtype)} for name, size in SIZES.items()
    }
    return {
        "blocks": [modules["blocks.0"], modules["blocks.1"]],
        "inp": modules["inp"],
        "out": modules["out"],
    }


def canonical(params):
    """The parameters by torch's name, in torch's axis order, written down without the map."""
    modules = {
        "inp": params["inp"],
        "blocks.0": params["blocks"][0],
        "blocks.1": params["blocks"][1],
        "out": params["out"],
    }
    found = {}
    for name, module in modules.items():
        found[f"{name}.weight"] = np.asarray(module["kernel"]).T
        found[f"{name}.bias"] = np.asarray(module["bias"])
    return found


def small_batch(num_samples=12, dtype=None, seed=1):
    rng, dtype = np.random.default_rng(seed), numpy_dtype(dtype or widest())
    return {"x": rng.normal(size=(num_samples, 3)).astype(dtype), "y": rng.normal(size=(num_samples, 2)).astype(dtype)}


def small_loss(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["inp"]["kernel"] + params["inp"]["bias"])
    for block in params["blocks"]:
        hidden = hidden + jnp.tanh(hidden @ block["kernel"] + block["bias"])
    return jnp.mean((hidden @ params["out"]["kernel"] + params["out"]["bias"] - batch["y"]) ** 2)


def linear_loss(params, batch):
    """A loss whose gradient is the batch: the leaves of the batch are those of the parameters, with a leading dim 1."""
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(batch), strict=True)
    return sum(jnp.sum(leaf * grad[0]) for leaf, grad in pairs)


def saved_for_backward(step, *args):
    """Shapes of the values that forward saves for backward, which recomputes the others."""
    shapes = []

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "optimization_barrier":
                shapes.extend(var.aval.shape for var in equation.invars)
            for value in equation.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    walk(inner)

    walk(jax.make_jaxpr(step)(*args).jaxpr)
    return shapes
