"""A transformed function in the way of haiku: init and apply, a NamedTuple of params, average and optimizer state, jax.grad."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax


class TrainingState(NamedTuple):
    params: Any
    avg_params: Any
    opt_state: optax.OptState


class Batch(NamedTuple):
    image: Any
    label: Any


class Transformed(NamedTuple):
    init: Any
    apply: Any


def net_fn():
    sizes = {"mlp/~/linear_0": (25, 16), "mlp/~/linear_1": (16, 12), "mlp/~/linear_2": (12, 10)}

    def init(rng):
        keys = jax.random.split(rng, len(sizes))
        return {
            name: {"w": jax.random.truncated_normal(key, -2, 2, size) / np.sqrt(size[0]), "b": jnp.zeros(size[1])}
            for key, (name, size) in zip(keys, sizes.items())
        }

    def apply(params, images):
        x = images.astype(jnp.float32).reshape(images.shape[0], -1) / 255.0
        for i, name in enumerate(sizes):
            x = x @ params[name]["w"] + params[name]["b"]
            x = jax.nn.relu(x) if i < len(sizes) - 1 else x
        return x

    return Transformed(init, apply)


def main():
    network = net_fn()
    optimiser = optax.adam(1e-2)

    def loss(params, batch):
        logits = network.apply(params, batch.image)
        l2 = 0.5 * sum(jnp.sum(jnp.square(p)) for p in jax.tree_util.tree_leaves(params))
        log_likelihood = jnp.sum(jax.nn.one_hot(batch.label, 10) * jax.nn.log_softmax(logits))
        return -log_likelihood / batch.label.shape[0] + 1e-4 * l2

    @jax.jit
    def evaluate(params, batch):
        return jnp.mean(jnp.argmax(network.apply(params, batch.image), axis=-1) == batch.label)

    @jax.jit
    def update(state, batch):
        grads = jax.grad(loss)(state.params, batch)
        updates, opt_state = optimiser.update(grads, state.opt_state)
        params = optax.apply_updates(state.params, updates)
        avg_params = optax.incremental_update(params, state.avg_params, step_size=0.001)
        return TrainingState(params, avg_params, opt_state)

    rng = np.random.default_rng(0)
    batches = [Batch(rng.integers(256, size=(8, 5, 5, 1)).astype(np.uint8), rng.integers(10, size=8)) for _ in range(7)]
    params = network.init(jax.random.PRNGKey(0))
    state = TrainingState(params, params, optimiser.init(params))
    loss_now = jax.jit(loss)
    for step in range(6):
        if step % 3 == 0:
            print({"step": step, "accuracy": float(evaluate(state.avg_params, batches[6]))})
        print("loss", float(loss_now(state.params, batches[step])))
        state = update(state, batches[step])


if __name__ == "__main__":
    main()
