"""What the backend does once for each parameter or region, counted: twice as many take twice the work."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crossframe.param_map import identity_map
from jax_backend import shard, sharded_optimizer
from jax_backend.programs._late_gathers import _LateGathers
from jax_backend.recorder._modules import module_paths
from jax_backend.recorder._params_as_shards import ShardPieces
from jax_backend.shards._sharded_params import mesh_of
from jax_backend.state._optimizer_state import StateLeaves
from tests.on_jax.helpers.small import mesh_of_size
from tests.on_jax.helpers.work import assert_linear

SIZES = (20, 80)


def params_of(num):
    """As many parameters in one unit, of shape (2, 2)."""
    return {f"p{i}": np.full((2, 2), i, "float32") for i in range(num)}


def sharded_of(num, layout="per_param", **options):
    return shard(params_of(num), mesh_of_size(2), layout=layout, **options)


def on_dim_1(spec):
    return 1


def test_optimizer_updates_are_linear_in_parameters():
    optimizer = sharded_optimizer(optax.adam(1e-2))

    def update(sharded):
        state = jax.eval_shape(optimizer.init, sharded)
        jax.eval_shape(optimizer.update, sharded, state, sharded)

    assert_linear(update, lambda num: (sharded_of(num),), SIZES)


@pytest.mark.parametrize("layout", ["flat", "per_param", "ragged"])
def test_sharding_is_linear_in_parameters(layout):
    assert_linear(sharded_of, lambda num: (num, layout), SIZES)


@pytest.mark.parametrize("dims", [None, on_dim_1], ids=["rows", "columns"])
def test_recording_is_linear_in_parameters(dims):
    def record(sharded, state):
        source = ShardPieces(sharded)
        source.pieces(sharded)
        source.state(state)

    def make(num):
        sharded = sharded_of(num, dims=dims)
        return sharded, sharded_optimizer(optax.adam(1e-2)).init(sharded)

    assert_linear(record, make, SIZES)


def test_saving_state_is_linear_in_parameters():
    def make(num):
        sharded = sharded_of(num)
        return sharded_optimizer(optax.adam(1e-2)).init(sharded), sharded, mesh_of(sharded)

    assert_linear(StateLeaves, make, SIZES)


def test_zeroing_padding_is_linear_in_parameters():
    def make(num):
        sharded = shard({f"p{i}": np.ones((3, 2), "float32") for i in range(num)}, mesh_of_size(2), layout="flat")
        bucket = sharded.tree.buckets[0]
        return bucket, sharded.shards[bucket.name]

    assert_linear(lambda bucket, array: jax.eval_shape(lambda a: bucket.zero_padding(a), array), make, SIZES)


def test_modules_are_named_in_linear_work():
    assert_linear(lambda num: module_paths(identity_map(f"m.{i}.w" for i in range(num))), lambda num: (num,), SIZES)


def test_programs_are_cut_in_linear_work():
    """Regions of a program that gathers each unit when something needs it."""

    def program(num):
        def loss(shards):
            total = jnp.zeros(())
            for i, own in enumerate(shards):
                with jax.named_scope(f"crossframe:all_gather[{i}]"):
                    full = jnp.concatenate([own, own])
                total = total + jnp.tanh(full).sum()
            return total

        shards = [jnp.ones(2)] * num
        return jax.make_jaxpr(loss)(shards).jaxpr, shards

    def cut(jaxpr, shards):
        run = _LateGathers(jaxpr, ("all_gather",), lambda number: number)
        jax.eval_shape(lambda *shards: run.run((), shards), *shards)

    assert_linear(cut, program, SIZES)
