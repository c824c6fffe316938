"""Train a small net of attention over sets, of flax.linen, by a chain of optax under jit: masks, a warm-up, Nesterov's Adam.

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
    "own_softmax": "the softmax by exponentials and their sum",
    "own_norm": "layer norm by hand",
    "scan_batch": "gradients accumulate over three microbatches in a scan",
    "chain_by_hand": "decay and learning rate written out instead of by optax",
    "clip_by_hand": "gradients are clipped by hand",
    "donated": "parameters and optimizer state are donated to the step",
}
FAULTS = {
    "decay_after_rate": "decayed weights are added after the scaling by the learning rate",
    "moments_lost": "the optimizer's state is made anew before step 2",
}
WIDTH, LENGTH, RATE, DECAY = 16, 7, 5e-3, 0.02


class Norm(nn.Module):
    """Layer norm by flax or by hand."""

    by_hand: bool
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if not self.by_hand:
            return nn.LayerNorm(name="norm", dtype=self.dtype, param_dtype=self.dtype)(x)
        return ByHand(self.dtype, name="norm")(x)


class ByHand(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), self.dtype)
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],), self.dtype)
        centred = x - x.mean(-1, keepdims=True)
        return centred / jnp.sqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6) * scale + bias


class SetNet(nn.Module):
    """Elements (sets, LENGTH, 4) and their mask to a value of each set."""

    on: frozenset[str]
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        kinds = {"param_dtype": self.dtype, "dtype": self.dtype}

        def dense(width: int, name: str, use_bias: bool = True) -> nn.Dense:
            return nn.Dense(width, use_bias=use_bias, name=name, **kinds)

        def weights(scores: jax.Array) -> jax.Array:
            scores = jnp.where(mask[:, None], scores, -1e9)
            if "own_softmax" not in self.on:
                return nn.softmax(scores)
            shifted = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
            return shifted / shifted.sum(-1, keepdims=True)

        x = dense(WIDTH, "embed")(x)
        given = Norm("own_norm" in self.on, self.dtype, name="before")(x)
        query, key, value = (dense(WIDTH, name, False)(given) for name in ("query", "key", "value"))
        scores = jnp.einsum("bid,bjd->bij", query, key) / WIDTH**0.5
        x = x + dense(WIDTH, "mix", False)(jnp.einsum("bij,bjd->bid", weights(scores), value))
        x = x + dense(WIDTH, "leave")(nn.gelu(dense(2 * WIDTH, "enter")(x)))
        seed = self.param("seed", nn.initializers.normal(0.5), (1, WIDTH), self.dtype)
        pooled = weights(jnp.einsum("sd,bjd->bsj", seed, x)) @ x
        return dense(1, "head")(pooled[:, 0])[:, 0]


def make_gradients(net: SetNet, on: set[str]):
    """A function to (loss, gradients) of a batch, as a whole or in three microbatches."""

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        run = lambda params, x, mask: net.apply({"params": params}, x, mask)  # noqa: E731
        found = (jax.checkpoint(run) if "remat" in on else run)(params, batch["x"], batch["mask"])
        return jnp.square(found - batch["y"]).mean()

    whole = jax.value_and_grad(loss)
    if "scan_batch" not in on:
        return whole

    def accumulated(params: Any, batch: dict[str, jax.Array]) -> Any:
        parts = jax.tree.map(lambda leaf: leaf.reshape(3, -1, *leaf.shape[1:]), batch)
        zero = jax.tree.map(jnp.zeros_like, (jnp.zeros((), jax.tree.leaves(params)[0].dtype), params))

        def add(total: Any, part: Any) -> tuple[Any, None]:
            return jax.tree.map(lambda a, b: a + b / 3, total, whole(params, part)), None

        return jax.lax.scan(add, zero, parts)[0]

    return accumulated


def clip_by_hand(most: float) -> optax.GradientTransformation:
    def update(grads: Any, state: Any, params: Any = None) -> Any:
        norm = jnp.sqrt(sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(grads)))
        return jax.tree.map(lambda leaf: leaf * jnp.minimum(1, most / norm), grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def rate(count: jax.Array) -> jax.Array:
    return RATE * jnp.minimum(1.0, (count + 1) / 3)


def decay_and_rate_by_hand() -> list[optax.GradientTransformation]:
    """Decay of matrices, and the learning rate, as two transformations."""

    def add(updates: Any, state: Any, params: Any) -> Any:
        return jax.tree.map(lambda u, p: u + DECAY * p if p.ndim > 1 else u, updates, params), state

    def scale(updates: Any, state: Any, params: Any = None) -> Any:
        found = jax.tree.map(lambda u: -rate(state.count).astype(u.dtype) * u, updates)
        return found, optax.ScaleByScheduleState(state.count + 1)

    start = lambda params: optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))  # noqa: E731
    empty = optax.MaskedState(optax.EmptyState())
    return [optax.GradientTransformation(lambda params: empty, add), optax.GradientTransformation(start, scale)]


def make_optimizer(on: set[str]) -> optax.GradientTransformation:
    clip = clip_by_hand(1.0) if "clip_by_hand" in on else optax.clip_by_global_norm(1.0)
    matrices = lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)  # noqa: E731
    decay, scale = optax.add_decayed_weights(DECAY, matrices), optax.scale_by_learning_rate(rate)
    if "chain_by_hand" in on:
        decay, scale = decay_and_rate_by_hand()
    none = optax.identity()
    last = [none, scale, decay] if "decay_after_rate" in on else [decay, scale, none]
    return optax.chain(clip, optax.scale_by_adam(0.9, 0.98, eps=1e-6, nesterov=True), *last)


def batch_of(step: int, seed: int, dtype: Any) -> dict[str, np.ndarray]:
    """12 sets of 3 to LENGTH elements, whose value is that of their largest element."""
    draw = np.random.default_rng((seed, step, 271))
    x = draw.standard_normal((12, LENGTH, 4)).astype(np.float32)
    mask = np.arange(LENGTH)[None] < draw.integers(3, LENGTH + 1, (12, 1))
    y = np.where(mask, np.sin(x[..., 0]) + 0.5 * x[..., 1], -np.inf).max(1)
    return {"x": (x * mask[..., None]).astype(dtype), "mask": mask, "y": y.astype(dtype)}


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
    first = batch_of(0, options.seed, dtype)
    # The same values for all variants: parameters are drawn by the plain net.
    params = SetNet(frozenset(), dtype).init(jax.random.key(options.seed), first["x"], first["mask"])["params"]
    optimizer, gradients = make_optimizer(on), make_gradients(SetNet(frozenset(on), dtype), on)

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
            name="SetNet",
            samples=lambda batch: batch["x"],
            seed=options.seed,
            settings={"optimizer": "nadamw"},
        )
    with recorder as running:
        opt_state = optimizer.init(params)
        run = step if running is None else running.wrap(step)
        for i in range(options.steps):
            if "moments_lost" in on and i == 2:
                opt_state = optimizer.init(params)
            params, opt_state, loss, _ = run(params, opt_state, batch_of(i, options.seed, dtype))
            print(f"step {i} loss {float(loss):.12f}", flush=True)


if __name__ == "__main__":
    main()
