"""Train a small convolutional net of flax.linen with group norm, by a chain of optax under jit.

`--record FOLDER` records the run with `jax_backend.Recorder`.
"""

import argparse
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from jax_backend import Recorder

CLEAN = {
    "base": "one jitted step",
    "remat": "forward is computed again in backward",
    "own_norm": "group norm by hand",
    "scan_batch": "gradients accumulate over four microbatches in a scan",
    "chain_by_hand": "momentum written out instead of optax.sgd",
    "one_hot_loss": "the loss from one-hot labels",
    "donated": "parameters and optimizer state are donated to the step",
    "clip_by_hand": "gradients are clipped by hand",
}
FAULTS = {
    "clip_updates": "updates are clipped instead of gradients",
}
CLASSES, SIDE = 5, 8


class OwnNorm(nn.Module):
    """Group norm by hand, with the parameters of nn.GroupNorm."""

    num_groups: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), x.dtype)
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],), x.dtype)
        grouped = x.reshape(x.shape[0], -1, self.num_groups, x.shape[-1] // self.num_groups)
        centred = grouped - grouped.mean((1, 3), keepdims=True)
        found = centred * jax.lax.rsqrt(jnp.square(centred).mean((1, 3), keepdims=True) + 1e-6)
        return found.reshape(x.shape) * scale + bias


class Net(nn.Module):
    on: frozenset[str]
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Images (batch, SIDE, SIDE, 2) to logits (batch, CLASSES)."""
        kinds = {"param_dtype": self.dtype, "dtype": self.dtype}

        def norm(name: str) -> Any:
            if "own_norm" in self.on:
                return OwnNorm(4, name=name)
            return nn.GroupNorm(num_groups=4, name=name, **kinds)

        x = nn.relu(norm("norm1")(nn.Conv(8, (3, 3), name="conv1", **kinds)(x)))
        x = nn.Conv(16, (3, 3), strides=2, padding=((1, 1), (1, 1)), name="conv2", **kinds)(x)
        x = nn.relu(norm("norm2")(x)).mean((1, 2))
        return nn.Dense(CLASSES, name="head", **kinds)(x)


def make_loss(net: Net, on: set[str]):
    def of_logits(logits: jax.Array, labels: jax.Array) -> jax.Array:
        if "one_hot_loss" in on:
            return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, CLASSES, dtype=logits.dtype)).mean()
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        run = lambda params, x: net.apply({"params": params}, x)  # noqa: E731
        run = jax.checkpoint(run) if "remat" in on else run
        return of_logits(run(params, batch["x"]), batch["y"])

    return loss


def make_gradients(loss: Any, on: set[str]):
    """A function to (loss, gradients) of a batch, as a whole or in four microbatches."""
    whole = jax.value_and_grad(loss)
    if "scan_batch" not in on:
        return whole

    def accumulated(params: Any, batch: dict[str, jax.Array]) -> Any:
        parts = jax.tree.map(lambda leaf: leaf.reshape(4, -1, *leaf.shape[1:]), batch)
        zero = jax.tree.map(jnp.zeros_like, (jnp.zeros((), jax.tree.leaves(params)[0].dtype), params))

        def add(total: Any, part: Any) -> Any:
            return jax.tree.map(lambda a, b: a + b / 4, total, whole(params, part))

        return jax.lax.scan(lambda total, part: (add(total, part), None), zero, parts)[0]

    return accumulated


def clip_by_hand(most: float) -> optax.GradientTransformation:
    def update(grads: Any, state: Any, params: Any = None) -> Any:
        norm = jnp.sqrt(sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(grads)))
        return jax.tree.map(lambda leaf: leaf * jnp.minimum(1, most / norm).astype(leaf.dtype), grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def momentum_by_hand(decay: float) -> optax.GradientTransformation:
    def update(grads: Any, state: Any, params: Any = None) -> Any:
        trace = jax.tree.map(lambda g, t: g + decay * t, grads, state.trace)
        return trace, optax.TraceState(trace)

    return optax.GradientTransformation(lambda params: optax.TraceState(jax.tree.map(jnp.zeros_like, params)), update)


def make_optimizer(on: set[str]) -> optax.GradientTransformation:
    rate = lambda count: 0.1 * 0.8**count  # noqa: E731
    clip = clip_by_hand(0.5) if "clip_by_hand" in on else optax.clip_by_global_norm(0.5)
    decayed = lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)  # noqa: E731
    moment = momentum_by_hand(0.9) if "chain_by_hand" in on else optax.trace(0.9)
    parts = [optax.add_decayed_weights(0.01, decayed), moment, optax.scale_by_learning_rate(rate)]
    return optax.chain(*parts, clip) if "clip_updates" in on else optax.chain(clip, *parts)


def batch_of(step: int, seed: int, dtype: Any) -> dict[str, np.ndarray]:
    """12 images, whose class is a shift of their brightness."""
    draw = np.random.default_rng((seed, step, 1618))
    labels = draw.integers(0, CLASSES, 12).astype(np.int32)
    x = draw.standard_normal((12, SIDE, SIDE, 2)) + labels[:, None, None, None] * np.linspace(-1, 1, SIDE)[:, None]
    return {"x": x.astype(np.float32).astype(dtype), "y": labels}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", default="base", help="names joined by +")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--record", default="", help="folder of a recording")
    parser.add_argument("--dense", type=int, default=4)
    options = parser.parse_args()
    on = set(options.variant.split("+"))
    assert on <= CLEAN.keys() | FAULTS.keys(), on
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", options.dtype == "float64")
    dtype = jnp.dtype(options.dtype)
    net = Net(frozenset(on), dtype)
    first = batch_of(0, options.seed, dtype)["x"]
    # The same values for all variants: parameters are drawn by the plain net.
    params = Net(frozenset(), dtype).init(jax.random.key(options.seed), first)["params"]
    optimizer = make_optimizer(on)
    gradients = make_gradients(make_loss(net, on), on)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = gradients(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, {"grads": grads}

    step = jax.jit(step, donate_argnums=(0, 1) if "donated" in on else ())
    recorder = nullcontext()
    if options.record:
        recorder = Recorder(
            options.record,
            params,
            every=1,
            dense=options.dense,
            steps=options.steps,
            name="Net",
            samples=lambda batch: batch["x"],
            seed=options.seed,
            settings={"optimizer": "sgd"},
        )
    with recorder as running:
        opt_state = optimizer.init(params)
        run = step if running is None else running.wrap(step)
        for i in range(options.steps):
            params, opt_state, loss, _ = run(params, opt_state, batch_of(i, options.seed, dtype))
            print(f"step {i} loss {float(loss):.12f}", flush=True)


if __name__ == "__main__":
    main()
