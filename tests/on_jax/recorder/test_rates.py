"""The learning rate of each step, as the loop says it or as optax keeps it."""

import jax.numpy as jnp
import numpy as np
import optax

from crossframe.recording import Recording
from jax_backend.recorder import Recorder


def test_rates_are_those_of_the_loop_or_of_optax(tmp_path):
    params = {"w": jnp.ones(3)}
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=lambda count: 0.5 / (count + 1))
    state = tx.init(params)
    with Recorder(tmp_path / "r", params, every=4) as recorder:
        for i in range(3):
            _, state = tx.update(params, state, params)
            said = 0.125 if i == 2 else None
            recorder.step(params=params, loss=1.0, batch=np.full(2, i), opt_state=state, learning_rate=said)
    found = Recording.open(tmp_path / "r")
    assert [found.learning_rates(i) for i in range(3)] == [(0.5,), (0.25,), (0.125,)]
