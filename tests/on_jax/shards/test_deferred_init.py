"""Sharded initialisation: the same bits as the whole model's, and never the whole model."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from crossframe import MeshSpec
from crossframe.errors import UsageError
from jax_backend import init, make_mesh, shard
from jax_backend.nnx import params_of
from jax_backend.shards._build_tree import build_tree
from jax_backend.shards._deferred_init import program_of
from jax_backend.shards._options import Options
from tests.on_jax.helpers.small import SIZES, UNITS, small_map, small_params


def same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim) and a.dtype == b.dtype


def drawn():
    """The small model's parameters, from one stream of keys."""
    keys = iter(jax.random.split(jax.random.key(0), 2 * len(SIZES)))
    return small_params("float32", draw=lambda shape: Drawn(jax.random.normal(next(keys), shape, jnp.float32)))


class Drawn:
    """What `small_params` casts."""

    def __init__(self, value):
        self.value = value

    def astype(self, dtype):
        return self.value


@pytest.mark.parametrize(
    ("layout", "spec"),
    [
        ("flat", MeshSpec(3)),
        pytest.param("ragged", MeshSpec(2), marks=pytest.mark.exhaustive),
        ("per_param", MeshSpec(shard=2, replicate=2)),
    ],
)
def test_R38_what_is_made_unit_by_unit_is_bit_for_bit_what_is_made_at_once(layout, spec):
    mesh, options = make_mesh(spec), {"units": UNITS, "param_map": small_map(), "layout": layout, "frozen": ("out",)}
    same(init(drawn, mesh, **options), shard(jax.jit(drawn)(), mesh, **options))


def test_R38_stacked_and_scaled_parameters_and_modules_of_nnx():
    mesh = make_mesh(MeshSpec(2))

    def stacked():
        weights = 0.02 * jax.random.normal(jax.random.key(1), (3, 5, 3))
        return {"blocks": {"w": weights, "b": jnp.ones((3, 5))}, "out": jnp.zeros(5)}

    for layout in ("flat", "per_param"):
        options: Any = {"layout": layout, "stacked": ("blocks",)}
        same(init(stacked, mesh, **options), shard(jax.jit(stacked)(), mesh, **options))

    def module():
        return params_of(nnx.Linear(3, 5, rngs=nnx.Rngs(0)))

    same(init(module, mesh), shard(jax.jit(module)(), mesh))


def held_while_making_one_of(num_blocks, numel):
    """Bytes of a device at the peak, beside the shards that are there: temporary ones and what comes out."""
    mesh = make_mesh(MeshSpec(4))

    def blocks():
        keys = jax.random.split(jax.random.key(0), num_blocks)
        return {"blocks": [{"w": jax.random.normal(key, (numel,), jnp.float32)} for key in keys]}

    tree = build_tree(jax.eval_shape(blocks), 4, Options(units=[f"blocks.{i}" for i in range(num_blocks)]))
    memory: Any = program_of(blocks, tree, tree.buckets[1], mesh).lower().compile().memory_analysis()
    assert memory.output_size_in_bytes == 4 * numel
    return memory.temp_size_in_bytes + memory.output_size_in_bytes


def test_R38_no_device_ever_holds_the_whole_model():
    numel, few, many = 4096, 2, 16
    unit = 4 * numel
    held = held_while_making_one_of(many, numel)
    # What a unit takes while it is made, random bits included, is the same however many others there are.
    assert abs(held - held_while_making_one_of(few, numel)) < unit / 4
    assert held < many * unit / 2


def test_wrong_arguments_are_refused():
    mesh: Any = make_mesh(MeshSpec(2))
    with pytest.raises(UsageError, match="fn: expected a function"):
        init({"w": np.ones(3)}, mesh)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"\['unit'\] are not options of shard"):
        init(drawn, mesh, unit=UNITS)
