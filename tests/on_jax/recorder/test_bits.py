"""What a recorder must not change: any bit of a step, whether it records it densely, sparsely or not at all."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crossframe.precision import PrecisionPolicy
from crossframe.recording import Recording
from jax_backend import Recorder, apply_updates, shard, sharded_optimizer, value_and_grad
from jax_backend.activations import is_anyone_listening, tell
from tests.conftest import EXHAUSTIVE
from tests.on_jax.helpers.small import UNITS, mesh_of_size, small_batch, small_map, small_params

# By step: how it is recorded under the schedule.
KINDS = {0: "densely", 1: "not at all", 2: "sparsely", 3: "densely, in a window"}
SCHEDULE = {"dense": 1, "every": 2, "windows": [(3, 4)]}
STEPS = len(KINDS)


def telling(params, batch):
    """The small model's loss, which tells all that its modules are given and give. What is told is a product that is added to
    something next: XLA may make one fused multiply-add of both, which rounds once, unless the product is a result too."""

    def module(name, x, layer):
        tell(name, "input", x)
        x = x @ layer["kernel"] + layer["bias"]
        tell(name, "output", x)
        return x

    hidden = jnp.tanh(module("inp", batch["x"], params["inp"]))
    for i, block in enumerate(params["blocks"]):
        normed = (hidden - hidden.mean(-1, keepdims=True)) / jnp.sqrt(hidden.var(-1, keepdims=True) + 1e-5)
        product = normed * jax.nn.softmax(module(f"blocks.{i}.gate", normed, block) / 3.0)
        tell(f"blocks.{i}", "output", product)
        hidden = hidden + product
    return jnp.mean((module("out", hidden, params["out"]) - batch["y"]) ** 2)


def trained(step_of, sharded, end):
    """All numbers of a few steps of AdamW: two microbatches each, whose gradients `step_of` makes."""
    optimizer = sharded_optimizer(optax.adamw(1e-2, weight_decay=0.1))
    state, update, found = optimizer.init(sharded), jax.jit(optimizer.update), []
    waits, reduces = step_of(reduces=False), step_of()
    for i in range(STEPS):
        first, second = (small_batch(8, "float32", seed=2 * i + j) for j in range(2))
        waiting = waits(sharded, first)
        result = reduces(sharded, second, accumulated=waiting.grads)
        updates, state = update(result.grads, state, sharded)
        sharded = apply_updates(sharded, updates)
        end(sharded, result, state, second)
        found.append((waiting.losses, waiting.grads, result.losses, result.loss, result.grads, sharded, state))
    return [[np.asarray(leaf) for leaf in jax.tree.leaves(step)] for step in found]


POLICIES = {"full": PrecisionPolicy(), "mixed": PrecisionPolicy("bfloat16", reduce_dtype="float32")}


# What mixes the most; each layout, mode and policy with --exhaustive.
CASES = {
    "flat, mixed precision": ("flat", "shard_map", "mixed"),
}
if os.environ.get(EXHAUSTIVE):
    CASES["per_param, under jit"] = ("per_param", "jit", "full")
    CASES["per_param"] = ("per_param", "shard_map", "full")


@pytest.mark.parametrize(("layout", "mode", "policy"), CASES.values(), ids=CASES)
def test_recording_changes_no_bit_of_a_step(tmp_path, layout, mode, policy):
    options = {"units": UNITS, "param_map": small_map(), "layout": layout, "mp_policy": POLICIES[policy]}
    mesh = mesh_of_size(2)
    sharded = shard(small_params("float32"), mesh, **options)
    expected = trained(lambda **given: value_and_grad(telling, mesh, mode=mode, **given), sharded, lambda *_: None)
    with Recorder(tmp_path / "r", sharded, **SCHEDULE) as recorder:

        def end(params, result, state, batch):
            recorder.step(params=params, grads=result.grads, loss=result.losses, opt_state=state, batch=batch)

        found = trained(lambda **given: recorder.value_and_grad(telling, mode=mode, **given), sharded, end)
    recording = Recording.open(tmp_path / "r")
    assert [step for step in range(STEPS) if recording.activations(step)] == [0, 3]
    assert recording.recorded_steps() == (0, 2, 3)
    for step, how in KINDS.items():
        pairs = zip(found[step], expected[step], strict=True)
        differ = [i for i, (a, b) in enumerate(pairs) if a.tobytes() != b.tobytes()]
        assert not differ, f"step {step}, recorded {how}: of {len(found[step])} arrays these differ: {differ}"


def test_numbers_are_of_the_program_that_records_nothing(tmp_path):
    """Also where the one that records rounds differently, as that of this loss does, which looks whether anyone listens."""

    def loss(params, batch):
        tell("", "input", batch["x"])
        return telling(params, batch) * (1 + 2.0**-20 * is_anyone_listening())

    mesh, batch = mesh_of_size(2), small_batch(8, "float32")
    sharded = shard(small_params("float32"), mesh, units=UNITS, param_map=small_map())
    expected = value_and_grad(loss, mesh, local_grads=True)(sharded, batch)
    with Recorder(tmp_path / "r", sharded, dense=1) as recorder:
        found = recorder.value_and_grad(loss, local_grads=True)(sharded, batch)
        recorder.step(params=sharded, grads=found.grads, loss=found.losses, batch=batch)
    assert Recording.open(tmp_path / "r").activations(0)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
