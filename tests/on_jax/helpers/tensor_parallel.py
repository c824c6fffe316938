"""A small transformer, its layers stacked, whose parameters a mesh with the model axis "tp" divides."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from crossframe import MeshSpec
from jax_backend import make_mesh, scan, shard
from tests.on_jax.helpers.small import wide

DIM, HEADS, HIDDEN, VOCAB, LAYERS = 8, 2, 16, 12, 2
BY_OUTPUT, BY_INPUT = {"query", "up", "head"}, {"out", "down", "embed"}
ALONE, SHARDED, PARALLEL = (MeshSpec(1), {}), (MeshSpec(2), {}), (MeshSpec(2), {"tp": 2})
HYBRID = (MeshSpec(shard=2, replicate=2), {"tp": 2})


def model_partition(spec):
    name = spec.name.split(".")[-1]
    return P(None, "tp") if name in BY_OUTPUT else P("tp") if name in BY_INPUT else None


def dims(spec):
    return int(spec.name.split(".")[-1] in BY_INPUT)


@cache
def params():
    rng = np.random.default_rng(0)
    shapes = {"query": (DIM, DIM), "out": (DIM, DIM), "up": (DIM, HIDDEN), "down": (HIDDEN, DIM), "scale": (DIM,)}
    blocks = {name: 0.3 * rng.normal(size=(LAYERS, *shape)) for name, shape in shapes.items()}
    return wide({"embed": rng.normal(size=(VOCAB, DIM)), "blocks": blocks, "head": rng.normal(size=(DIM, VOCAB))})


def tokens():
    return np.random.default_rng(1).integers(VOCAB, size=(4, 6))


def loss_fn(params, tokens):
    def block(x, own, _):
        normed = (1 + own["scale"]) * x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-3)
        heads = (normed @ own["query"]).reshape(*x.shape[:-1], HEADS, DIM // HEADS)
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", heads, heads))
        x = x + jnp.einsum("bhqk,bkhd->bqhd", scores, heads).reshape(x.shape) @ own["out"]
        hidden = normed @ own["up"]
        if "tp" in jax.sharding.get_abstract_mesh().axis_names:
            hidden = jax.lax.with_sharding_constraint(hidden, P(None, None, "tp"))
        return x + jax.nn.gelu(hidden) @ own["down"], None

    x, _ = scan(block, params["embed"][tokens[:, :-1]], params["blocks"])
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], tokens[:, 1:]).mean()


def on_mesh(kind, values=None, **options):
    """(mesh, shards of the model)"""
    spec, axes = kind
    mesh = make_mesh(spec, model_axes=axes)
    partition = model_partition if axes else None
    values = params() if values is None else values
    return mesh, shard(values, mesh, stacked=("blocks",), dims=dims, model_partition=partition, **options)
