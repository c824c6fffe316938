import os
from itertools import product

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from crossframe.errors import UsageError
from crossframe.param_map import MapEntry, ParamMap
from crossframe.reference import ReferenceUnit
from jax_backend import shard, shards_of, unshard, value_and_grad, writeback
from tests.conftest import EXHAUSTIVE
from tests.on_jax.helpers.small import (
    EPS,
    UNITS,
    WIDE,
    WORLDS,
    canonical,
    mesh_of_size,
    small_batch,
    small_loss,
    small_map,
    small_params,
    wide,
)


def sharded_over(world_size, params=None, **kwargs):
    params = small_params() if params is None else params
    return shard(params, mesh_of_size(world_size), units=UNITS, param_map=small_map(), **{"layout": "flat", **kwargs})


def test_R19_R20_axes_that_are_not_their_own_inverse_go_there_and_back():
    # A convolution: torch's (out, in, height, width) is flax's (height, width, in, out).
    kernel = wide(np.arange(2.0 * 3 * 4 * 5).reshape(2, 3, 4, 5))
    pmap = ParamMap((MapEntry("conv.weight", "conv.kernel", "h w i o -> o i h w"),))
    sharded = shard({"conv": {"kernel": kernel}}, mesh_of_size(2), param_map=pmap, keep_original=False, layout="flat")
    line = np.concatenate([shards_of(sharded, rank)[""] for rank in range(2)])
    np.testing.assert_array_equal(line, np.einsum("hwio->oihw", kernel).reshape(-1))
    np.testing.assert_array_equal(unshard(sharded)["conv"]["kernel"], kernel)
    edited = {"conv": {"kernel": kernel + 1}}
    assert_same(unshard(writeback(sharded, edited)), edited)


def poisoned(sharded):
    """The same shards with NaN in every element of padding."""
    shards = {}
    for unit, layout in sharded.tree.units:
        buffer = np.asarray(sharded.shards[unit]).copy()
        for rank in range(layout.world_size):
            for run in layout.padding(rank):
                start = rank * layout.padded_shard_numel
                buffer[start + run.start : start + run.stop] = np.nan
        shards[unit] = jax.device_put(buffer, sharded.shards[unit].sharding)
    assert any(np.isnan(array).any() for array in shards.values())
    return type(sharded)(shards, sharded.tree)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("keep_original", [True, False])
@pytest.mark.parametrize("world_size", WORLDS)
def test_R19_unshard_is_the_inverse_of_shard_bit_for_bit(world_size, keep_original):
    params = small_params()
    full = unshard(sharded_over(world_size, params, keep_original=keep_original))
    assert jax.tree.structure(full) == jax.tree.structure(params)
    assert_same(full, params)
    leaf = full["blocks"][0]["kernel"]
    assert leaf.is_fully_replicated and len(leaf.sharding.device_set) == world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_R20_writeback_persists_edits_and_leaves_the_old_shards(world_size):
    sharded = sharded_over(world_size)
    edited = jax.tree.map(lambda leaf: leaf + 1, unshard(sharded))
    assert_same(unshard(writeback(sharded, edited)), edited)
    assert_same(unshard(sharded), small_params())


def test_R20_ranks_that_hold_different_values_merge_slice_by_slice():
    world_size = 3
    sharded = sharded_over(world_size)
    mesh = mesh_of_size(world_size)
    of_rank = [small_params(seed=10 + rank) for rank in range(world_size)]

    def diverged(*leaves):
        parts = [jax.device_put(leaf, device) for leaf, device in zip(leaves, mesh.devices.flat, strict=True)]
        return jax.make_array_from_single_device_arrays(leaves[0].shape, NamedSharding(mesh, P()), parts)

    written = writeback(sharded, jax.tree.map(diverged, *of_rank))
    for unit, layout in sharded.tree.units:
        reference = ReferenceUnit(layout, canonical(small_params()), fill=False)
        reference.writeback([canonical(params) for params in of_rank])
        for rank in range(world_size):
            np.testing.assert_array_equal(shards_of(written, rank)[unit], reference.shards[rank])


@pytest.mark.parametrize(
    ("world_size", "keep_original"),
    list(product([3, 4], [True, False])) if os.environ.get(EXHAUSTIVE) else [(3, True), (4, False)],
)
def test_R05_poisoned_padding_reaches_neither_parameters_nor_losses_nor_gradients(world_size, keep_original):
    sharded = sharded_over(world_size, keep_original=keep_original)
    bad = poisoned(sharded)
    assert_same(unshard(bad), unshard(sharded))
    step = value_and_grad(small_loss, mesh_of_size(world_size))
    clean, dirty = step(sharded, small_batch()), step(bad, small_batch())
    np.testing.assert_array_equal(clean.losses, dirty.losses)
    assert_same(clean.grads.shards, dirty.grads.shards)
    rewritten = writeback(bad, unshard(bad))
    assert_same(rewritten.shards, sharded.shards)


@pytest.mark.parametrize("world_size", [3, 4] if os.environ.get(EXHAUSTIVE) else [3])
def test_R30_the_norm_of_shards_is_that_of_parameters_and_gradients(world_size):
    sharded = sharded_over(world_size)
    grads = value_and_grad(small_loss, mesh_of_size(world_size))(sharded, small_batch()).grads
    for tree in (sharded, grads):
        # The same 92 squares, summed in another order: a sum of n terms >= 0 is off by at most n roundings, twice.
        np.testing.assert_allclose(optax.tree.norm(tree), optax.tree.norm(unshard(tree)), rtol=92 * EPS)


def refused(match, full, world_size=2):
    with pytest.raises(UsageError, match=match):
        writeback(sharded_over(world_size), full)


def test_R20_writeback_refuses_what_does_not_fit_by_name():
    full = small_params()
    full["inp"]["kernel"] = full["inp"]["kernel"].T
    refused(rf"'inp.kernel' \('inp.weight'\): expected shape \(3, 5\) and dtype {WIDE}, got \(5, 3\)", full)
    refused(f"expected shape .* and dtype {WIDE}, got .* and float16", small_params("float16"))
    full = small_params()
    full["more"] = full.pop("out")
    refused(r"missing \['out.bias', 'out.kernel'\], unexpected \['more.bias', 'more.kernel'\]", full)


def test_unshard_and_writeback_inside_jit_and_grad_are_refused():
    sharded = sharded_over(2)
    with pytest.raises(UsageError, match="outside jit and grad"):
        jax.grad(lambda tree: unshard(tree)["inp"]["bias"].sum())(sharded)
    with pytest.raises(UsageError, match="outside jit and grad"):
        jax.jit(unshard)(sharded)
    with pytest.raises(UsageError, match="outside jit and grad"):
        jax.jit(writeback)(sharded, small_params())
