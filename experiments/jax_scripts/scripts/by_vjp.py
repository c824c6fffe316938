"""Updates by optax whose gradients come from jax.vjp, as in scripts that need the cotangent of the outputs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax


def model(params, x):
    return jnp.tanh(x @ params["w"]) @ params["v"]


@jax.jit
def step(params, opt_state, x, y):
    out, pullback = jax.vjp(lambda p: model(p, x), params)
    (grads,) = pullback(2 * (out - y) / out.size)
    updates, opt_state = optax.adam(1e-2).update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, jnp.mean((out - y) ** 2)


def main():
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(4, 8)), jnp.float32), "v": jnp.asarray(rng.normal(size=8), jnp.float32)}
    opt_state = optax.adam(1e-2).init(params)
    for i in range(60):
        x = rng.normal(size=(8, 4)).astype(np.float32)
        params, opt_state, loss = step(params, opt_state, x, x.prod(1))
        print("step", i, "loss", float(loss), flush=True)


if __name__ == "__main__":
    main()
