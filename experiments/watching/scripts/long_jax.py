"""Train a small net in JAX by optax for some hundred steps, in one jitted step."""

import argparse
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

CLEAN = {"base": "AdamW with a warm-up", "momentum": "SGD with momentum"}
FAULTS = {
    "nan": "from step 250 on, the root of a negative number",
    "ascent": "from step 250 on, updates are added with the wrong sign",
    "dead": "from step 250 on, no gradient reaches the first layer",
}
START, FEATURES, WIDTH, CLASSES = 250, 24, 64, 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", default="base", choices=CLEAN | FAULTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    on, draw = options.variant, np.random.default_rng(options.seed)
    sizes = [FEATURES, WIDTH, WIDTH, CLASSES]
    layers = [
        {"kernel": jnp.asarray(draw.normal(0, rows**-0.5, (rows, columns)), jnp.float32), "bias": jnp.zeros(columns)}
        for rows, columns in pairwise(sizes)
    ]
    params = {"layers": layers}
    teacher = draw.normal(size=(FEATURES, CLASSES))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 30, options.steps)
    optimizer = optax.sgd(0.1, momentum=0.9) if on == "momentum" else optax.adamw(schedule, weight_decay=0.01)

    def loss_of(params: Any, x: Any, y: Any, is_faulty: Any) -> Any:
        h = x
        for i, layer in enumerate(params["layers"]):
            h = h @ layer["kernel"] + layer["bias"]
            if i == 0 and on == "dead":
                h = jnp.where(is_faulty, jax.lax.stop_gradient(h), h)
            if i < len(sizes) - 2:
                h = jax.nn.gelu(h)
        if on == "nan":
            h = jnp.where(is_faulty, jnp.sqrt(h), h)
        return optax.softmax_cross_entropy_with_integer_labels(h, y).mean()

    @jax.jit
    def step(params: Any, opt_state: Any, x: Any, y: Any, is_faulty: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, x, y, is_faulty)
        if on == "ascent":
            grads = jax.tree.map(lambda grad: jnp.where(is_faulty, -grad, grad), grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state = optimizer.init(params)
    for i in range(options.steps):
        x = draw.normal(size=(32, FEATURES)).astype(np.float32)
        y = (x @ teacher).argmax(-1)
        params, opt_state, _ = step(params, opt_state, x, y, np.bool_(i >= START))


if __name__ == "__main__":
    main()
