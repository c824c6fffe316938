"""Train a small net in JAX by optax for some hundred steps, with a habit that could be mistaken for a fault, or with a fault."""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

CLEAN = {
    "lamb": "LAMB with a cosine",
    "one_cycle": "Adam with a rate that rises to ten times its first value and falls to a hundredth of it",
    "floor": "a loss that falls by orders of magnitude to the noise of its targets; SGD",
}
FAULTS = {
    "inputs_not_scaled": "from the start on, inputs are a hundred times as large",
    "root_of_negative": "from the start on, the root of a number that is negative for some samples",
    "labels_shuffled": "from the start on, labels belong to other samples",
}
START, FEATURES, WIDTH, CLASSES = 205, 16, 48, 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", required=True, choices=CLEAN | FAULTS)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    on, draw = options.variant, np.random.default_rng(7)
    outputs = 1 if on == "floor" else CLASSES
    params = {
        "enter": {"w": jnp.asarray(draw.normal(0, 0.25, (FEATURES, WIDTH)), jnp.float32), "b": jnp.zeros(WIDTH)},
        "leave": {"w": jnp.asarray(draw.normal(0, 0.15, (WIDTH, outputs)), jnp.float32), "b": jnp.zeros(outputs)},
    }
    teacher = draw.normal(size=(FEATURES, outputs))
    rates = optax.cosine_onecycle_schedule(options.steps, 1e-2, div_factor=10, final_div_factor=100)
    optimizer = {
        "lamb": lambda: optax.lamb(optax.cosine_decay_schedule(1e-2, options.steps)),
        "one_cycle": lambda: optax.adam(rates),
        "floor": lambda: optax.sgd(0.05),
    }.get(on, lambda: optax.adamw(2e-3))()

    def loss_of(params: Any, x: Any, y: Any, is_faulty: Any) -> Any:
        h = jnp.tanh(x @ params["enter"]["w"] + params["enter"]["b"])
        h = h @ params["leave"]["w"] + params["leave"]["b"]
        if on == "floor":
            return jnp.square(h[:, 0] - y).mean()
        if on == "root_of_negative":
            inside = jnp.where(is_faulty, h, jnp.square(h) + 1)  # its gradient is finite before the start
            h = jnp.where(is_faulty, jnp.sqrt(inside), h)
        return optax.softmax_cross_entropy_with_integer_labels(h, y).mean()

    @jax.jit
    def step(params: Any, opt_state: Any, x: Any, y: Any, is_faulty: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, x, y, is_faulty)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state = optimizer.init(params)
    for i in range(options.steps):
        is_faulty = i >= START
        x = draw.normal(size=(32, FEATURES)).astype(np.float32)
        scores = x @ teacher
        y = np.tanh(scores[:, 0]).astype(np.float32) if on == "floor" else scores.argmax(-1)
        if is_faulty and on == "inputs_not_scaled":
            x = 100 * x
        if is_faulty and on == "labels_shuffled":
            y = np.roll(y, 1)
        params, opt_state, _ = step(params, opt_state, x, y, np.bool_(is_faulty))


if __name__ == "__main__":
    main()
