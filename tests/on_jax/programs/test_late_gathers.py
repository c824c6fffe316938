"""Every platform runs the same program; with late_gathers, units that are gathered when something needs them."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crossframe import MeshSpec
from crossframe.errors import UnsupportedError
from crossframe.strategy import Strategy
from crossframe.trace import ALL_GATHER
from jax_backend import compiled_trace, make_mesh, shard, shards_of, value_and_grad
from tests.conftest import EXHAUSTIVE
from tests.on_jax.helpers.small import UNITS, WIDE, mesh_of_size, small_batch, small_loss, small_map, small_params, wide
from tests.on_jax.helpers.stacked import MODES, stacked_loss, stacked_params

NUM_BLOCKS, WIDTH = 6, 64
BLOCKS = tuple(f"{i}" for i in range(NUM_BLOCKS))


class DeviceOf:
    """A device that says it is of another platform."""

    def __init__(self, device, platform):
        self._device, self.platform, self.device_kind = device, platform, platform

    def __getattr__(self, name):
        return getattr(self._device, name)

    def __hash__(self):
        return hash(self._device)


@pytest.mark.parametrize("mode", MODES)
def test_the_program_does_not_depend_on_the_platform(mode):
    spec = MeshSpec(shard=2, replicate=2)
    args = shard(stacked_params(), make_mesh(spec), stacked=("blocks",)), small_batch()
    programs = set()
    for platform in ("cpu", "cuda", "tpu"):
        mesh = make_mesh(spec, [DeviceOf(device, platform) for device in jax.devices()])
        programs.add(str(jax.make_jaxpr(value_and_grad(stacked_loss, mesh, mode=mode))(*args)).replace(platform, ""))
    assert len(programs) == 1
    traced = jax.jit(value_and_grad(stacked_loss, make_mesh(spec), mode=mode)).trace(*args)
    lowered = {traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cpu", "cuda", "tpu")}
    assert len(lowered) == 1


def test_late_gathers_on_other_devices_than_cpus_raise():
    mesh = make_mesh(MeshSpec(2), [DeviceOf(device, "cuda") for device in jax.devices()])
    with pytest.raises(UnsupportedError, match="late_gathers: expected a mesh of CPU devices, got 'cuda'"):
        value_and_grad(small_loss, mesh, late_gathers=True)


def deep_loss(params, x):
    for name in BLOCKS:
        x = jnp.tanh(x @ params[name]["w"] + params[name]["b"])
    return jnp.mean(x**2)


def deep(strategy, mode):
    rng, mesh = np.random.default_rng(0), mesh_of_size(2)
    params = wide({name: {"w": rng.normal(size=(WIDTH, WIDTH)), "b": rng.normal(size=WIDTH)} for name in BLOCKS})
    step = value_and_grad(deep_loss, mesh, mode=mode, strategy=strategy, late_gathers=True)
    return step, shard(params, mesh, units=BLOCKS), np.ones((2, WIDTH)), mesh


@pytest.mark.parametrize("mode", MODES)
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
@pytest.mark.parametrize(("mode", "world_size"), [("shard_map", 2), ("jit", 3)])
def test_late_gathers_change_no_number(mode, world_size, poison):
    mesh, batch = mesh_of_size(world_size), small_batch()
    batch["x"][0, 0] += poison
    params = shard(small_params(), mesh, units=UNITS, param_map=small_map())
    found, expected = (
        value_and_grad(small_loss, mesh, mode=mode, late_gathers=late)(params, batch) for late in (True, False)
    )
    np.testing.assert_array_equal(found.losses, expected.losses)
    for rank in range(world_size):
        for unit, line in shards_of(expected.grads, rank).items():
            np.testing.assert_array_equal(shards_of(found.grads, rank)[unit], line)
