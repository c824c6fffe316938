"""A monitor of a recorded loop in JAX: an alarm, the dense window and the checkpoint that follow."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from crossframe.monitoring import Kind, Monitor
from crossframe.recording import Recording
from jax_backend import Recorder
from tests.on_jax.helpers.recorded_loops import mesh_of

STEPS, WRONG, EVERY = 14, 7, 4


def train(directory, monitor, *, wrong):
    draw = np.random.default_rng(0)
    params = {"w": jnp.asarray(draw.normal(size=(4, 3)), jnp.float32)}
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(lambda p: jnp.square(batch[0] @ p["w"]).mean() * batch[1])(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, {"grads": grads}

    opt_state = optimizer.init(params)
    with Recorder(directory, params, mesh=mesh_of(data=2), every=100, dense=1, monitor=monitor) as recorder:
        run = recorder.wrap(step)
        for i in range(STEPS):
            scale = np.float32(np.nan if wrong and i == WRONG else 1.0)
            batch = (draw.normal(size=(2, 4)).astype(np.float32), scale)
            params, opt_state, *_ = run(params, opt_state, batch)


def test_an_alarm_opens_a_window_and_keeps_a_checkpoint(tmp_path):
    kept = []
    monitor = Monitor(every=EVERY, window=2, checkpoint=kept.append)
    train(tmp_path, monitor, wrong=True)
    assert [(alarm.kind, alarm.step) for alarm in monitor.alarms] == [(Kind.NOT_FINITE, WRONG)] and kept == [8]
    assert Recording.open(tmp_path).recorded_steps() == (0, 8, 9)


def test_a_healthy_run_has_no_alarm(tmp_path):
    monitor = Monitor(every=EVERY)
    train(tmp_path, monitor, wrong=False)
    assert monitor.alarms == [] and Recording.open(tmp_path).recorded_steps() == (0,)
