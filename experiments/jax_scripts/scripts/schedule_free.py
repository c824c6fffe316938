"""Schedule-free AdamW: gradients at one point, evaluation at another one, in a loop without jit around the update."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib


def predict(params, x):
    hidden = jax.nn.relu(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return hidden @ params["out"]["kernel"] + params["out"]["bias"]


@jax.jit
def loss_fn(params, x, y):
    return jnp.mean((predict(params, x) - y) ** 2)


def main():
    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        "hidden": {"kernel": jax.random.normal(keys[0], (5, 16)) * 0.4, "bias": jnp.zeros(16)},
        "out": {"kernel": jax.random.normal(keys[1], (16, 1)) * 0.25, "bias": jnp.zeros(1)},
    }
    solver = optax.contrib.schedule_free_adamw(learning_rate=0.02, warmup_steps=2)
    opt_state = solver.init(params)
    rng = np.random.default_rng(0)
    held_out = rng.normal(size=(32, 5)).astype(np.float32)
    for i in range(6):
        x = rng.normal(size=(8, 5)).astype(np.float32)
        y = np.sin(x.sum(axis=1, keepdims=True))
        loss, grad = jax.value_and_grad(loss_fn)(params, x, y)
        updates, opt_state = solver.update(grad, opt_state, params)
        params = optax.apply_updates(params, updates)
        print(f"iteration {i} loss {float(loss)}")
        if i % 2:
            eval_params = optax.contrib.schedule_free_eval_params(opt_state, params)
            print("test", float(loss_fn(eval_params, held_out, np.sin(held_out.sum(axis=1, keepdims=True)))))


if __name__ == "__main__":
    main()
