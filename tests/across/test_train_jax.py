"""The JAX training script: the same run in one process and in two, interrupted or not, is plain training, and what it refuses."""

import json
import os
import shutil
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

from crossframe.errors import UsageError
from experiments.data import text_batch
from experiments.parity.record_jax import nnx_params
from experiments.train.settings import TrainSettings
from experiments.train_jax import train
from jax_backend.nnx import split, with_params

WHAT = {
    "model": "gpt-tiny",
    "steps": 4,
    "batch_size": 8,
    "warmup_steps": 2,
    "clip": 0.5,
    "seed": 3,
    "checkpoint_every": 2,
}
HOW = {"precision": "float64", "layout": "flat", "micro_batch_size": 2}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run on two devices of this process, from its beginning to its end."""
    settings = TrainSettings(tmp_path_factory.mktemp("whole"), **WHAT, **HOW)
    train(settings, jax.devices("cpu")[:2])
    return settings


def start(folder, *more):
    """The script in a process of its own."""
    # A test of arithmetic: that XLA optimises its machine code would cost more than all the rest.
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "experiments.train_jax", "--output", str(folder), *more]
    command += [word for name, value in (WHAT | HOW).items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(*processes):
    said = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(said)
    return said


def lines(folder):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in found]


def test_two_processes_go_on_where_one_was_killed_and_end_as_if_it_had_not_been(whole, tmp_path):
    resumed = tmp_path / "resumed"
    # What a run leaves that is killed while it writes its second checkpoint, and a third one that rotted on its disk.
    shutil.copytree(whole.output, resumed)
    checkpoints = resumed / "checkpoints"
    rotten = checkpoints / "step-00000004" / "rank-00001.safetensors"
    rotten.write_bytes(rotten.read_bytes()[:-1] + bytes([rotten.read_bytes()[-1] ^ 1]))
    (checkpoints / "writing-step-00000003").mkdir()
    with (resumed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    more = ["--cpu-devices", "1", "--coordinator", address, "--num-processes", "2", "--process-id"]
    said = ended(*(start(resumed, *more, str(i)) for i in range(2)))
    assert "going on from step 2" in said[0] + said[1]

    # Two ranks: a sum of two terms has one order (R32), in one process or over gloo.
    assert lines(resumed) == lines(whole.output)
    assert sorted(path.name for path in checkpoints.iterdir()) == [
        "damaged-step-00000004",
        "step-00000002",
        "step-00000004",
    ]
    for rank in range(2):
        a, b = (
            load_file(f / "checkpoints" / "step-00000004" / f"rank-0000{rank}.safetensors")
            for f in (whole.output, resumed)
        )
        assert a.keys() == b.keys() and len(a) >= 3 * 3
        for name in a:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def plainly(settings):
    """Losses and norms of the gradient of the same run without any sharding: optax's AdamW on the whole batch."""
    definition = settings.definition
    graphdef, params, state = split(definition.make_flax("float64"))
    params = jax.tree.map(
        jnp.asarray, nnx_params(definition, params, definition.initial_params(settings.seed, "float64"))
    )
    rates = jnp.asarray([settings.learning_rate_at(step) for step in range(settings.steps)])
    optimizer = optax.adamw(lambda count: rates[count], weight_decay=settings.weight_decay)

    @jax.jit
    def step(params, opt_state, tokens, targets):
        def loss_of(params):
            logits = with_params(graphdef, params, state)(tokens)
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        norm = jnp.sqrt(sum(jnp.sum(grad**2) for grad in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda grad: grad * jnp.minimum(1.0, settings.clip / (norm + 1e-6)), grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, norm

    opt_state, found = optimizer.init(params), []
    for i in range(settings.steps):
        batch = text_batch(settings.seed, i, 0, 1, settings.batch_size, definition.context)
        params, opt_state, loss, norm = step(params, opt_state, batch.tokens, batch.targets)
        found.append((i + 1, float(loss), float(norm)))
    return found


def test_a_run_is_plain_training_and_bfloat16_computes_near_it(whole, tmp_path):
    expected = plainly(whole)
    assert len(expected) == 4 and expected[0][2] > 2 * whole.clip  # or nothing was clipped
    np.testing.assert_allclose(lines(whole.output), expected, rtol=1e-11)

    low = TrainSettings(tmp_path, **WHAT | {"steps": 2}, precision="bfloat16", layout="flat")
    train(low, jax.devices("cpu")[:2])
    # bfloat16 has 8 bits: logits of order 1 are off by some 2 ** -8, and must be, or nothing was computed in it.
    difference = np.abs(np.subtract(lines(low.output), expected[:2]))[:, 1]
    assert 1e-6 < difference.max() < 0.02
    for settings, dtype in ((whole, "float64"), (low, "float32")):
        stored = load_file(settings.output / "checkpoints" / "step-00000002" / "rank-00000.safetensors")
        assert {str(array.dtype) for array in stored.values()} == {dtype, "int32"}

    other = TrainSettings(tmp_path, **WHAT | {"batch_size": 3}, precision="bfloat16", layout="flat")
    with pytest.raises(UsageError, match=r"checkpoints are of a mesh of \{'shard': 2\}.*this run has \{'shard': 3\}"):
        train(other, jax.devices("cpu")[:3])
