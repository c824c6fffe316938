"""The JAX training script: the same run in one process and in two, interrupted or not, and what it refuses."""

import json
import os
import shutil
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from crossframe.errors import UsageError
from experiments.train.settings import TrainSettings
from experiments.train_jax import train

ARGUMENTS = ["--model", "gpt-tiny", "--batch-size", "8", "--micro-batch-size", "2", "--warmup-steps", "2", "--clip", "0.5",
             "--steps", "4", "--checkpoint-every", "2", "--precision", "float64", "--seed", "3"]  # fmt: skip


def start(folder, *more):
    """The script in a process of its own."""
    # A test of arithmetic: that XLA optimises its machine code would cost more than all the rest.
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "experiments.train_jax", "--output", str(folder), *ARGUMENTS, *more]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(*processes):
    said = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(said)
    return said


def lines(folder):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in found]


def test_two_processes_go_on_where_one_was_killed_and_end_as_if_it_had_not_been(tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    ended(start(whole, "--cpu-devices", "2"))
    assert [step for step, _, _ in lines(whole)] == [1, 2, 3, 4] and lines(whole)[3][1] < lines(whole)[0][1]

    # What a run leaves that is killed while it writes its second checkpoint, and a third one that rotted on its disk.
    shutil.copytree(whole, resumed)
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
    assert lines(resumed) == lines(whole)
    assert sorted(path.name for path in checkpoints.iterdir()) == [
        "damaged-step-00000004",
        "step-00000002",
        "step-00000004",
    ]
    for rank in range(2):
        a, b = (
            load_file(f / "checkpoints" / "step-00000004" / f"rank-0000{rank}.safetensors") for f in (whole, resumed)
        )
        assert a.keys() == b.keys() and len(a) >= 3 * 3
        for name in a:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def test_bfloat16_computes_near_float32_and_stores_it(tmp_path):
    losses = {}
    for precision in ("float32", "bfloat16"):
        settings = TrainSettings(
            tmp_path / precision,
            "gpt-tiny",
            layout="flat",
            steps=2,
            batch_size=4,
            warmup_steps=0,
            precision=precision,
            seed=3,
        )
        train(settings, jax.devices("cpu")[:2])
        losses[precision] = [loss for _, loss, _ in lines(settings.output)]
        stored = load_file(settings.output / "checkpoints" / "step-00000002" / "rank-00000.safetensors")
        assert {array.dtype for array in stored.values()} == {np.dtype("float32"), np.dtype("int32")}
    # bfloat16 has 8 bits: logits of order 1 are off by some 2 ** -8, and must be, or nothing was computed in it.
    difference = np.abs(np.subtract(losses["float32"], losses["bfloat16"]))
    assert 0 < difference.max() < 0.02

    other = TrainSettings(tmp_path / "float32", "gpt-tiny", layout="flat", steps=4, batch_size=3, seed=3)
    with pytest.raises(UsageError, match=r"checkpoints are of a mesh of \{'shard': 2\}.*this run has \{'shard': 3\}"):
        train(other, jax.devices("cpu")[:3])
