"""Fits a small network to data and to a differential equation by optax's L-BFGS, parameters in a plain dict.

python train.py [--cached] [--search backtracking] [--loop layers] [--custom] [--minibatch]

With --minibatch, --cached is the mistake: what the line search has is of the points of the step before.
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--search", choices=["zoom", "backtracking"], default="zoom")
parser.add_argument("--memory", type=int, default=5)
parser.add_argument(
    "--cached", action="store_true", help="Take value and gradient from the line search, if it has them."
)
parser.add_argument("--loop", choices=["scan", "layers"], default="scan", help="How the equal layers are applied.")
parser.add_argument("--custom", action="store_true", help="Activation with a derivative written by hand.")
parser.add_argument("--minibatch", action="store_true", help="Other points in each step.")
args = parser.parse_args()

jax.config.update("jax_enable_x64", True)
dtype = jnp.float64
WIDTH, LAYERS, POINTS = 16, 3, 32


@jax.custom_vjp
def written_out(x):
    return x * jax.nn.sigmoid(x)


def forward(x):
    s = jax.nn.sigmoid(x)
    return x * s, (x, s)


def backward(saved, g):
    x, s = saved
    return (g * (s + x * s * (1 - s)),)


written_out.defvjp(forward, backward)
activation = written_out if args.custom else jax.nn.silu


def init():
    random = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(random.standard_normal(shape) / np.sqrt(shape[-2]), dtype)

    return {
        "in": {"w": normal(1, WIDTH), "b": jnp.asarray(random.uniform(-1, 1, WIDTH), dtype)},
        "layers": {"w": normal(LAYERS, WIDTH, WIDTH), "b": jnp.zeros((LAYERS, WIDTH), dtype)},
        "out": {"w": normal(WIDTH, 1), "b": jnp.zeros(1, dtype)},
    }


def net(params, t):
    x = activation(t @ params["in"]["w"] + params["in"]["b"])
    if args.loop == "scan":
        x, _ = jax.lax.scan(lambda x, layer: (x + activation(x @ layer["w"] + layer["b"]), None), x, params["layers"])
    else:
        for i in range(LAYERS):
            x = x + activation(x @ params["layers"]["w"][i] + params["layers"]["b"][i])
    return x @ params["out"]["w"] + params["out"]["b"]


def loss_fn(params, batch):
    """Data, and the equation u' = -u + sin(3 t) by finite differences of the network."""
    step = 0.01
    t = batch["t"]
    u, after, before = jnp.split(net(params, jnp.concatenate([t, t + step, t - step])), 3)
    slope = (after - before) / (2 * step)
    residual = slope + u - jnp.sin(3 * t)
    return jnp.mean((u - batch["u"]) ** 2) + 0.1 * jnp.mean(residual**2)


def points(step):
    random = np.random.default_rng(100 + (step if args.minibatch else 0))
    t = random.uniform(0, 2, size=(POINTS, 1))
    u = 0.1 * np.sin(3 * t) - 0.3 * np.cos(3 * t) + 1.3 * np.exp(-t) + 0.05 * random.standard_normal((POINTS, 1))
    return {"t": jnp.asarray(t, dtype), "u": jnp.asarray(u, dtype)}


if args.search == "zoom":
    search = optax.scale_by_zoom_linesearch(max_linesearch_steps=15, initial_guess_strategy="one")
else:
    search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=15, store_grad=True)
solver = optax.lbfgs(memory_size=args.memory, linesearch=search)


@jax.jit
def train_step(params, state, batch):
    value_fn = partial(loss_fn, batch=batch)
    if args.cached:
        value, grad = optax.value_and_grad_from_state(value_fn)(params, state=state)
    else:
        value, grad = jax.value_and_grad(value_fn)(params)
    updates, state = solver.update(grad, state, params, value=value, grad=grad, value_fn=value_fn)
    return optax.apply_updates(params, updates), state, value, optax.global_norm(grad)


def main():
    params = init()
    state = solver.init(params)
    for step in range(args.steps):
        params, state, value, norm = train_step(params, state, points(step))
        print(f"step {step} loss {value:.9g} norm {norm:.9g}")
    print(f"loss of the first points {loss_fn(params, points(0)):.9g}")


if __name__ == "__main__":
    main()
