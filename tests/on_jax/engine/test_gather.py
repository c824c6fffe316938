import os
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from crossframe import MeshSpec, reduction
from crossframe.api import Api
from crossframe.dtypes import numpy_dtype
from crossframe.reduction import DivideFactors, divide_factors
from crossframe.reference import ReferenceUnit
from jax_backend import make_mesh, shard, shards_of, unshard, value_and_grad
from jax_backend.engine._gather import divide
from jax_backend.ranks._collectives import all_reduce
from tests.conftest import EXHAUSTIVE
from tests.on_jax.helpers.small import UNITS, WIDE, canonical, linear_loss, mesh_of_size, small_map, small_params


def reduced(world_size, draw, dtype, **kwargs):
    """What a step reduces, and what the reference does: gradients that are drawn, not derived."""
    grads = [small_params(dtype, draw=draw) for _ in range(world_size)]
    batch = jax.tree.map(lambda *leaves: np.stack(leaves), *grads)
    mesh = mesh_of_size(world_size)
    sharded = shard(small_params(dtype), mesh, units=UNITS, param_map=small_map(), **{"layout": "flat", **kwargs})
    result = value_and_grad(linear_loss, mesh, local_grads=True)(sharded, batch)
    expected = {
        unit: ReferenceUnit(layout, canonical(small_params(dtype))).reduce(
            [canonical(grad) for grad in grads], divide_factors(world_size)
        )
        for unit, layout in sharded.tree.units
    }
    return result, expected, grads


def assert_reduced(result, expected, world_size):
    for rank in range(world_size):
        for unit, found in shards_of(result.grads, rank).items():
            # For bfloat16 the reference's quotient may come as float32, as numpy promotes it.
            np.testing.assert_array_equal(found, expected[unit][rank].astype(found.dtype))


@pytest.mark.parametrize("dtype", dict.fromkeys(["bfloat16", "float32", WIDE]))
@pytest.mark.parametrize("world_size", [1, 2])
def test_R26_R32_two_ranks_reduce_to_the_references_bits(world_size, dtype):
    rng = np.random.default_rng(2)
    result, expected, _ = reduced(world_size, lambda shape: rng.normal(size=shape), dtype)
    assert_reduced(result, expected, world_size)


@pytest.mark.parametrize("mode", ["shard_map", "jit"])
def test_R26_FSDP2_divides_between_the_two_sums_of_a_hybrid_mesh(mode):
    """In float32 its mean over a shard group comes from there. Sums of 4 integers up to 50, and their quarters, are exact."""
    rng = np.random.default_rng(4)
    grads = [small_params("float32", draw=lambda shape: rng.integers(-50, 50, size=shape)) for _ in range(4)]
    mesh = make_mesh(MeshSpec(shard=2, replicate=2))
    sharded = shard(small_params("float32"), mesh, units=UNITS, param_map=small_map(), layout="flat")
    batch = jax.tree.map(lambda *leaves: np.stack(leaves), *grads)
    result = value_and_grad(linear_loss, mesh, mode=mode, api=Api.FSDP2)(sharded, batch)
    mean = jax.tree.map(lambda *leaves: sum(leaves) / 4, *grads)
    jax.tree.map(np.testing.assert_array_equal, unshard(result.grads), mean)


# Each world size, dtype and kind of flat parameter; all combinations with --exhaustive.
INTEGERS = [(3, "bfloat16", True), (4, "float32", False), (3, WIDE, False)]
if os.environ.get(EXHAUSTIVE):
    INTEGERS = list(product([3, 4], dict.fromkeys(["bfloat16", "float32", WIDE]), [True, False]))


@pytest.mark.parametrize(("world_size", "dtype", "keep_original"), INTEGERS)
def test_R26_R32_small_integers_reduce_to_the_references_bits_at_3_and_4(world_size, dtype, keep_original):
    # Sums of at most 4 integers up to 50, halved, are exact: only the last division rounds, and it must be a division.
    rng = np.random.default_rng(3)
    result, expected, _ = reduced(
        world_size, lambda shape: rng.integers(-50, 50, size=shape), dtype, keep_original=keep_original
    )
    assert_reduced(result, expected, world_size)


def test_R26_the_factors_come_from_the_core_when_the_step_is_traced(monkeypatch):
    rng = np.random.default_rng(4)
    monkeypatch.setattr(reduction, "divide_factors", lambda num_ranks: DivideFactors(1.0, 1.0))
    result, _, grads = reduced(2, lambda shape: rng.integers(-50, 50, size=shape), WIDE)
    total = sum(canonical(grad)["blocks.0.weight"] for grad in grads)
    found = result.grads.tree.views("blocks.0", np.asarray(result.grads.shards["blocks.0"]))
    np.testing.assert_array_equal(found["blocks.0.weight"], total)


@pytest.mark.parametrize(("factor", "dtype"), [(1.5, "float32"), (16.0625, "bfloat16"), (4.0, WIDE), (3.0, "float16")])
def test_R26_a_division_is_a_division_in_every_dtype(factor, dtype):
    # 16.0625 is what 257 ranks divide by, and no bfloat16.
    array = np.arange(1, 2000).astype(numpy_dtype(dtype))
    wide = np.float64 if dtype == "float64" else np.float32
    expected = (array.astype(wide) / wide(factor)).astype(array.dtype)
    found = jax.jit(lambda values: divide(values, factor))(array)
    assert found.dtype == array.dtype
    if jax.default_backend() == "cpu" or dtype != "float32":
        np.testing.assert_array_equal(found, expected)
    else:  # where an approximate division may be off by two units in the last place
        np.testing.assert_array_max_ulp(np.asarray(found), expected, 2)


def test_R05_gradients_hold_0_in_the_padding():
    rng = np.random.default_rng(5)
    result, _, _ = reduced(3, lambda shape: rng.normal(size=shape), WIDE)
    runs = 0
    for unit, layout in result.grads.tree.units:
        for rank in range(3):
            for run in layout.padding(rank):
                assert not shards_of(result.grads, rank)[unit][run.start : run.stop].any()
                runs += 1
    assert runs


@pytest.mark.parametrize("world_size", [2, 3])
def test_local_gradients_are_each_ranks_own_before_any_division(world_size):
    rng = np.random.default_rng(6)
    result, _, grads = reduced(world_size, lambda shape: rng.normal(size=shape), WIDE)
    assert result.local_grads is not None
    for unit, layout in result.grads.tree.units:
        assert result.local_grads.lines[unit].shape == (world_size, layout.gathered_numel)
        for rank in range(world_size):
            views = result.grads.tree.views(unit, np.asarray(result.local_grads.lines[unit][rank]))
            for name, view in views.items():
                np.testing.assert_array_equal(view, canonical(grads[rank])[name])


def test_all_reduce_is_the_sum_over_replicas_in_the_arrays_own_shape():
    on_rank = lambda array: all_reduce(array, "")  # noqa: E731
    mesh = make_mesh(MeshSpec(shard=1, replicate=3))
    summed = jax.shard_map(on_rank, mesh=mesh, in_specs=P("replicate"), out_specs=P(), check_vma=False)
    np.testing.assert_array_equal(jax.jit(summed)(jnp.arange(6.0)), [6.0, 9.0])
