"""All of the training in one jax.lax.fori_loop, which only returns the last parameters: a regression with a Gaussian kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

NUM_STEPS = 10


def main():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.uniform(-2, 2, size=(32, 2)), jnp.float32)
    y = jnp.sin(x[:, 0]) + 0.1 * x[:, 1]
    params = {
        "centers": jnp.asarray(rng.normal(size=(8, 2)), jnp.float32),
        "weights": jnp.zeros(8),
        "scale": jnp.ones(()),
    }
    solver = optax.adam(0.05)

    def loss_fn(params, x, y):
        distances = jnp.sum((x[:, None] - params["centers"]) ** 2, axis=-1)
        prediction = jnp.exp(-distances * params["scale"] ** 2) @ params["weights"]
        return jnp.mean((prediction - y) ** 2)

    @jax.jit
    def fit(params, x, y):
        def body(i, carry):
            params, state = carry
            start = (i * 8) % 32
            loss, grads = jax.value_and_grad(loss_fn)(
                params, jax.lax.dynamic_slice_in_dim(x, start, 8), jax.lax.dynamic_slice_in_dim(y, start, 8)
            )
            updates, state = solver.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return jax.lax.fori_loop(0, NUM_STEPS, body, (params, solver.init(params)))

    print("before", float(loss_fn(params, x, y)))
    params, _ = fit(params, x, y)
    print("after", float(loss_fn(params, x, y)))


if __name__ == "__main__":
    main()
