"""Lookahead with fast and slow parameters: optax.apply_updates on a pair of pytrees, gradients of the fast one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax


def net(params, x):
    return jnp.tanh(x @ params["a"]) @ params["b"]


def loss(fast, batch):
    return optax.l2_loss(net(fast, batch["x"]), batch["y"]).mean()


optimizer = optax.lookahead(optax.adam(0.05), sync_period=3, slow_step_size=0.5)


@jax.jit
def train_step(params, opt_state, batch):
    loss_value, grads = jax.value_and_grad(loss)(params.fast, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss_value


def main():
    rng = np.random.default_rng(1)
    start = {"a": rng.normal(size=(4, 8)).astype(np.float32), "b": rng.normal(size=(8, 2)).astype(np.float32)}
    params = optax.LookaheadParams.init_synced(jax.tree.map(jnp.asarray, start))
    opt_state = optimizer.init(params)
    for i in range(7):
        batch = {"x": rng.normal(size=(8, 4)).astype(np.float32), "y": rng.normal(size=(8, 2)).astype(np.float32)}
        params, opt_state, value = train_step(params, opt_state, batch)
        print(f"step {i} loss {float(value)}")
    print("slow", float(loss(params.slow, batch)))


if __name__ == "__main__":
    main()
