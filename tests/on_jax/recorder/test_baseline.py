"""Goldens of runs in JAX: the fixture of the pytest plugin."""

import jax
import jax.numpy as jnp
import optax
import pytest

from crossframe.cli.fixture import Training


def trains(factor=1.0):
    def train():
        keys = jax.random.split(jax.random.key(0), 3)
        params = {"w": jax.random.normal(keys[0], (8, 16)), "v": jax.random.normal(keys[1], (16, 1))}
        optimizer = optax.sgd(0.1)
        state = optimizer.init(params)

        def loss_of(params, x):
            return jnp.mean((jnp.tanh(factor * x @ params["w"]) @ params["v"]) ** 2)

        @jax.jit
        def step(params, state, x):
            loss, grads = jax.value_and_grad(loss_of)(params, x)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        for i in range(3):
            params, state, _ = step(params, state, jax.random.normal(jax.random.fold_in(keys[2], i), (4, 8)))

    return train


def test_a_function_in_jax_matches_its_golden(tmp_path):
    told = []
    updating, training = (
        Training(tmp_path, tmp_path / "scratch", updates, of="test_of.py::test", tell=told.append)
        for updates in (True, False)
    )
    updating.matches("one", trains(), perturbed_runs=2)
    training.matches("one", trains())
    with pytest.raises(pytest.fail.Exception, match="There is a bug: at step 0"):
        training.matches("one", trains(factor=1.01))
