"""A script of several processes, recorded by `crossframe record` in each of them."""

import os
import socket
import subprocess
import sys

import numpy as np

from crossframe.recording import Recording
from crossframe.verdict import Verdict, compare

TRAIN = """
import os, sys
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
port, num_processes, process = map(int, sys.argv[1:] or os.environ["ARGUMENTS"].split())
if num_processes > 1:
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes, process)
mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
rng = np.random.default_rng(0)
def placed(values, spec):
    values = values.astype(np.float32)
    return jax.make_array_from_callback(values.shape, NamedSharding(mesh, spec), lambda index: values[index])
params = {"in": placed(rng.normal(size=(4, 6)), P("data")), "out": placed(rng.normal(size=6), P())}
hidden = jax.named_call(lambda w, x: jnp.tanh(x @ w), name="hidden")
tx = optax.adam(0.01)
opt_state = jax.jit(tx.init)(params)
@jax.jit
def step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((hidden(p["in"], x) @ p["out"] - y) ** 2))(params)
    updates, opt_state = tx.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss
for _ in range(3):
    x, y = placed(rng.normal(size=(8, 4)), P("data")), placed(rng.normal(size=8), P("data"))
    params, opt_state, loss = step(params, opt_state, x, y)
"""


def record(tmp_path, num_processes):
    """Record the script in processes of the command."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = str(listener.getsockname()[1])
    given = ["record", str(tmp_path / "script.py"), "--output", str(tmp_path / "processes"), "--every", "1"]
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "crossframe", *given, "--", port, str(num_processes), str(process)],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(num_processes)
    ]
    try:
        printed = [each.communicate(timeout=500)[0] for each in running]
    finally:
        for each in running:
            each.kill()
    assert [each.returncode for each in running] == [0] * num_processes, printed
    return Recording.open(tmp_path / "processes")


def test_two_processes_record_what_one_with_two_devices_records(tmp_path, run, monkeypatch):
    monkeypatch.setenv("ARGUMENTS", "0 1 0")
    status, _ = run(TRAIN, every=1, dense=16)
    assert status == 0
    one, two = Recording.open(tmp_path / "out"), record(tmp_path, 2)
    assert two.manifest.world_size == one.manifest.world_size == 2
    assert two.num_steps == 3 and two.recorded_steps() == (0, 1, 2)
    assert [two.batch(1, rank).digest for rank in range(2)] == [one.batch(1, rank).digest for rank in range(2)]
    assert two.activations(0) == one.activations(0) and (0, "hidden", "output") in two.activations(0)
    for rank in range(2):
        assert np.shape(two.activation(0, rank, 0, "hidden", "output")) == (4, 6)
    assert compare(one, two).verdict in (Verdict.EQUAL, Verdict.ROUNDING)
