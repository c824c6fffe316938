"""Clipping beside numpy on full gradients, with poison in the padding."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crossframe import MeshSpec
from crossframe.errors import UsageError
from crossframe.reference.grad_norm import clip_coefficient, combine, partial
from jax_backend import clip_grad_norm, make_mesh, shard, unshard
from jax_backend.shards._padding_mask import padding_of
from tests.on_jax.helpers.small import UNITS, WIDE, small_map, small_params, wide

ORDERS: Any = (2.0, 3.5, "inf")


def whole_numbers(seed=0, dtype="float32"):
    rng = np.random.default_rng(seed)
    return small_params(dtype, draw=lambda size: rng.integers(-9, 10, size))


def sharded_as(full, spec, layout):
    return shard(full, make_mesh(spec), units=UNITS, param_map=small_map(), layout=layout)


def poisoned(full, spec, layout):
    """The shards with NaN wherever shards of ones hold a 0."""
    sharded, ones = (sharded_as(each, spec, layout) for each in (full, jax.tree.map(np.ones_like, full)))
    return jax.tree.map(lambda array, real: jnp.where(real == 0, jnp.nan, array), sharded, ones)


@pytest.mark.parametrize(
    ("layout", "spec"),
    [("flat", MeshSpec(3)), ("ragged", MeshSpec(3)), ("per_param", MeshSpec(shard=2, replicate=2))],
)
def test_R30_each_element_counts_once_and_padding_never(layout, spec):
    full = whole_numbers()
    grads = poisoned(full, spec, layout)
    assert any(np.isnan(leaf).any() for leaf in jax.tree.leaves(grads))
    found = jax.jit(lambda grads: [clip_grad_norm(grads, 7.0, order) for order in ORDERS])(grads)
    for order, (clipped, norm) in zip(ORDERS, found, strict=True):
        wanted = combine([partial(jax.tree.leaves(full), order, "float32")], order, "float32")
        # Sums of whole numbers below 2**24 are exact in any order; a power of 3.5 is not.
        np.testing.assert_allclose(norm, wanted, rtol=0 if order != 3.5 else 1e-5)
        assert norm.dtype == jnp.float32
        coefficient = clip_coefficient(np.asarray(norm), 7.0)
        jax.tree.map(
            lambda a, b, c=coefficient: np.testing.assert_allclose(a, b * c, rtol=2e-7), unshard(clipped), full
        )
        assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(clipped))


def test_R30_the_norm_is_of_the_largest_dtype_and_gradients_keep_theirs():
    params = wide({"a": np.full(3, 3, jnp.bfloat16), "b": np.full((2, 2), 4.0)})
    clipped, norm = clip_grad_norm(shard(params, make_mesh(MeshSpec(2)), layout="per_param"), 1.0)
    assert norm.dtype == WIDE and float(norm) == np.sqrt(np.asarray(27.0 + 64, WIDE))
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(clipped)} == {"bfloat16", WIDE}
    same, norm = clip_grad_norm(clipped, 100.0, norm_type=1)
    jax.tree.map(np.testing.assert_array_equal, same, clipped)


@pytest.mark.parametrize("order", [2.0, "inf"])
def test_R30_a_nan_on_any_rank_is_passed_on_and_the_padding_stays_0(order):
    full = whole_numbers()
    clip = jax.jit(lambda grads: clip_grad_norm(grads, 1.0, order))
    for module in ("inp", "out"):  # the first elements of the root's line, and the last
        spoiled = jax.tree.map(np.copy, full)
        spoiled[module]["bias"][-1] = np.nan
        clipped, norm = clip(sharded_as(spoiled, MeshSpec(3), "flat"))
        assert np.isnan(norm)
        for bucket in clipped.tree.buckets:
            runs = padding_of(bucket.layout)
            assert runs and all(not np.any(clipped.shards[bucket.name][start:stop]) for start, stop in runs)


def test_wrong_arguments_are_refused():
    sharded = shard(wide({"w": np.ones(3)}), make_mesh(MeshSpec(2)))
    for args, message in [
        (({"w": 1}, 1.0), "grads: expected ShardedParams"),
        ((sharded, -1.0), "max_norm"),
        ((sharded, 1.0, 0), "norm_type"),
    ]:
        with pytest.raises(UsageError, match=message):
            clip_grad_norm(*args)
