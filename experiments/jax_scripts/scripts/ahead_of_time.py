"""A step that is lowered and compiled before the loop, to print its cost, and called as a compiled function."""

import jax
import jax.numpy as jnp
import numpy as np
import optax


def loss_fn(params, x, y):
    hidden = jax.nn.softplus(x @ params["w1"])
    return jnp.mean(jnp.abs(hidden @ params["w2"] - y))


def main():
    rng = np.random.default_rng(0)
    params = {
        "w1": jnp.asarray(rng.normal(size=(6, 8)), jnp.float32),
        "w2": jnp.asarray(rng.normal(size=8), jnp.float32),
    }
    tx = optax.adafactor(1e-2)
    opt_state = tx.init(params)

    def train_step(params, opt_state, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    x, y = rng.normal(size=(16, 6)).astype(np.float32), rng.normal(size=16).astype(np.float32)
    lowered = jax.jit(train_step).lower(params, opt_state, x, y)
    compiled = lowered.compile()
    print("compiled", compiled.cost_analysis() is not None)
    for step in range(5):
        x, y = rng.normal(size=(16, 6)).astype(np.float32), rng.normal(size=16).astype(np.float32)
        params, opt_state, loss = compiled(params, opt_state, x, y)
        print(f"step {step} loss {float(loss)}")


if __name__ == "__main__":
    main()
