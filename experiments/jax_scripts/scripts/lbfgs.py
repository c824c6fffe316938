"""L-BFGS with a line search: optax.value_and_grad_from_state takes value and gradient from the state where it can."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

jax.config.update("jax_enable_x64", True)


def main():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 5)), rng.integers(2, size=40)

    def fn(params):
        logits = x @ params["w"] + params["b"]
        return optax.sigmoid_binary_cross_entropy(logits, y).mean() + 1e-2 * jnp.sum(params["w"] ** 2)

    opt = optax.lbfgs()
    value_and_grad_fun = optax.value_and_grad_from_state(fn)

    @jax.jit
    def step(params, state):
        value, grad = value_and_grad_fun(params, state=state)
        updates, state = opt.update(grad, state, params, value=value, grad=grad, value_fn=fn)
        return optax.apply_updates(params, updates), state, value

    params = {"w": jnp.zeros(5), "b": jnp.zeros(())}
    state = opt.init(params)
    for i in range(6):
        params, state, value = step(params, state)
        print(f"iteration {i} loss {float(value)}")
    print("final", float(fn(params)))


if __name__ == "__main__":
    main()
