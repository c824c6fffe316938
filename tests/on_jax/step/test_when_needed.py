"""Units that are gathered when something needs them: what XLA's CPU compiler makes of it, and that no number changes."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crossframe.strategy import Strategy
from crossframe.trace import ALL_GATHER
from jax_backend import compiled_trace, shard, shards_of, value_and_grad
from jax_backend.engine import _jit_step as under_jit
from jax_backend.engine import _shard_map_step as on_rank
from tests.conftest import EXHAUSTIVE
from tests.on_jax.helpers.small import UNITS, WIDE, mesh_of_size, small_batch, small_loss, small_map, small_params, wide

NUM_BLOCKS, WIDTH = 6, 64
BLOCKS = tuple(f"{i}" for i in range(NUM_BLOCKS))


def deep_loss(params, x):
    for name in BLOCKS:
        x = jnp.tanh(x @ params[name]["w"] + params[name]["b"])
    return jnp.mean(x**2)


def deep(strategy, mode):
    rng, mesh = np.random.default_rng(0), mesh_of_size(2)
    params = wide({name: {"w": rng.normal(size=(WIDTH, WIDTH)), "b": rng.normal(size=WIDTH)} for name in BLOCKS})
    step = value_and_grad(deep_loss, mesh, mode=mode, strategy=strategy)
    return step, shard(params, mesh, units=BLOCKS), np.ones((2, WIDTH)), mesh


@pytest.mark.parametrize("mode", ["shard_map", "jit"])
def test_R14_what_is_gathered_again_does_not_lie_in_memory_meanwhile(mode):
    temporaries, gathered = {}, {}
    for strategy in (Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP):
        step, params, batch, mesh = deep(strategy, mode)
        memory: Any = jax.jit(step).lower(params, batch).compile().memory_analysis()
        temporaries[strategy] = memory.temp_size_in_bytes
        events = compiled_trace(step, params, batch, mesh=mesh)
        gathered[strategy] = [event.phase for event in events if event.kind == ALL_GATHER]
    unit_bytes = np.dtype(WIDE).itemsize * (WIDTH * WIDTH + WIDTH)
    # Without branches XLA keeps two copies of all six units, and under jit their gradients beside them.
    if mode == "shard_map":
        assert temporaries[Strategy.FULL_SHARD] < 4 * unit_bytes < 5 * unit_bytes < temporaries[Strategy.SHARD_GRAD_OP]
    else:
        assert temporaries[Strategy.FULL_SHARD] < 9 * unit_bytes
    assert gathered[Strategy.SHARD_GRAD_OP].count("backward") == 0
    # The first block's weights are not needed: nobody asks for the gradient of its input.
    assert gathered[Strategy.FULL_SHARD].count("backward") == NUM_BLOCKS - 1


@pytest.mark.parametrize("poison", [0.0, np.nan, *([np.inf] if os.environ.get(EXHAUSTIVE) else [])], ids=str)
@pytest.mark.parametrize("mode", ["shard_map", "jit"])
def test_no_number_depends_on_when_a_unit_is_gathered(mode, poison, monkeypatch):
    mesh, batch = mesh_of_size(2), small_batch()
    batch["x"][0, 0] += poison
    params = shard(small_params(), mesh, units=UNITS, param_map=small_map())
    found = value_and_grad(small_loss, mesh, mode=mode)(params, batch)
    for module in (on_rank, under_jit):
        monkeypatch.setattr(module, "merges_gathers", lambda mesh: False)
    expected = value_and_grad(small_loss, mesh, mode=mode)(params, batch)
    np.testing.assert_array_equal(found.losses, expected.losses)
    for rank in range(2):
        for unit, line in shards_of(expected.grads, rank).items():
            np.testing.assert_array_equal(shards_of(found.grads, rank)[unit], line)
