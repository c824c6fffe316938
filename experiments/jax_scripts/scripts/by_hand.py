"""Gradient descent that is written by hand: jax.grad, and parameters minus the gradient, without optax."""

import jax
import jax.numpy as jnp
import numpy as np


def predict(params, x):
    for w, b in params[:-1]:
        x = jnp.tanh(x @ w + b)
    w, b = params[-1]
    return x @ w + b


def loss(params, batch):
    x, y = batch
    return jnp.mean(jnp.square(predict(params, x) - y))


@jax.jit
def update(params, batch):
    grads = jax.grad(loss)(params, batch)
    return [(w - 0.05 * dw, b - 0.05 * db) for (w, b), (dw, db) in zip(params, grads)]


def main():
    rng = np.random.default_rng(0)
    sizes = [4, 8, 1]
    params = [(jnp.asarray(rng.normal(size=(n, m)), jnp.float32), jnp.zeros(m)) for n, m in zip(sizes[:-1], sizes[1:])]
    for step in range(60):
        x = rng.normal(size=(8, 4)).astype(np.float32)
        params = update(params, (x, x.sum(1, keepdims=True)))
        print("step", step, flush=True)


if __name__ == "__main__":
    main()
