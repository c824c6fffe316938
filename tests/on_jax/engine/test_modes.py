"""What XLA makes of a step in each mode: the table in docs/reference/jax.md."""

from collections import Counter

import jax
import numpy as np
import pytest

from crossframe import MeshSpec
from crossframe.precision import PrecisionPolicy
from crossframe.trace import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from jax_backend import compiled_trace, make_mesh, shard, trace_of, unshard, value_and_grad
from jax_backend.programs._trace import FOREIGN
from tests.on_jax.helpers.small import ATOL, UNITS, small_batch, small_loss, small_params
from tests.on_jax.helpers.stacked import MODES, stacked_loss, stacked_params

HYBRID = MeshSpec(shard=2, replicate=2)


def compiled(mode, sharded, batch, loss=small_loss):
    events = compiled_trace(value_and_grad(loss, make_mesh(HYBRID), mode=mode), sharded, batch, mesh=make_mesh(HYBRID))
    return [event for event in events if event.unit != FOREIGN]


MERGES_GATHERS = jax.default_backend() == "cpu" and jax.__version_info__ < (0, 11, 1)
"""Whether XLA merges the gathers of backward with those of forward."""


@pytest.mark.parametrize(
    ("mode", "sums", "again"),
    [
        ("shard_map", {REDUCE_SCATTER: 3, ALL_REDUCE: 3}, 0 if MERGES_GATHERS else 2),
        ("jit", {ALL_REDUCE: 6}, 2),
    ],
)
def test_collectives_of_plain_units(mode, sums, again):
    policy = PrecisionPolicy(reduce_dtype="bfloat16")
    sharded = shard(small_params("float32"), make_mesh(HYBRID), units=UNITS, mp_policy=policy, layout="flat")
    events = compiled(mode, sharded, small_batch(dtype="float32"))
    assert Counter(event.kind for event in events if event.kind != ALL_GATHER) == sums
    # XLA's CPU compiler sums 16 bits in 32.
    assert {event.dtype for event in events if event.kind != ALL_GATHER} == {"float32"}
    assert Counter(event.phase for event in events if event.kind == ALL_GATHER)["backward"] == again
    step = value_and_grad(small_loss, make_mesh(HYBRID), mode="shard_map")
    written = trace_of(step, sharded, small_batch(dtype="float32"), mesh=make_mesh(HYBRID))
    assert {event.dtype for event in written if event.kind != ALL_GATHER} == {"bfloat16"}


@pytest.mark.parametrize("mode", MODES)
def test_stacked_units_are_reduced_layer_by_layer_in_reduce_dtype(mode):
    policy = PrecisionPolicy(reduce_dtype="float16" if not jax.config.jax_enable_x64 else "float32")
    sharded = shard(stacked_params(), make_mesh(HYBRID), stacked=("blocks",), mp_policy=policy, layout="flat")
    events = compiled(mode, sharded, small_batch(), stacked_loss)
    gathers = Counter(event.phase for event in events if (event.kind, event.unit) == (ALL_GATHER, "blocks"))
    assert gathers == {"forward": 4, "backward": 4}
    sums = Counter(event.dtype for event in events if event.kind != ALL_GATHER and event.unit == "blocks")
    assert sums == {"float32": 8}


@pytest.mark.parametrize("spec", [MeshSpec(2), HYBRID], ids=str)
def test_a_loss_may_call_collectives_in_both_modes(spec):
    def loss(params, batch):
        return small_loss(params, batch) * jax.lax.pmean(batch["x"].mean(), "shard")

    mesh = make_mesh(spec)
    sharded = shard(small_params(), mesh, units=UNITS)
    one, other = (value_and_grad(loss, mesh, mode=mode)(sharded, small_batch()) for mode in MODES)
    np.testing.assert_allclose(one.losses, other.losses, rtol=0, atol=ATOL)
    full = (unshard(one.grads), unshard(other.grads))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=ATOL), *full)
