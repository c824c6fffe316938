"""Train a small transformer of flax (nnx) to classify sequences, with optax under jit.

`--record FOLDER` records the run with `jax_backend.Recorder`.
"""

import argparse
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jax_backend import Recorder

CLEAN = {
    "base": "one jitted step, matrix products for attention",
    "no_jit": "nothing is jitted",
    "remat": "each block's forward is computed again in backward",
    "einsum": "attention by einsum",
    "library_attention": "attention by jax.nn.dot_product_attention",
    "scan_batch": "gradients accumulate over four microbatches in a scan",
    "loop_batch": "gradients accumulate over four microbatches in a loop of Python",
    "reversed_batch": "the same microbatches in the opposite order",
    "vmap_samples": "the loss is a mean of losses of single samples under vmap",
    "chained": "AdamW as a chain of optax's parts",
    "donated": "parameters and optimizer state are donated to the step",
    "two_programs": "gradients and updates are two jitted functions",
    "log_softmax": "the loss by hand from log_softmax",
    "unrolled_norm": "layer norm by hand",
    "dropout": "a tenth of each MLP's output is dropped, by keys of step and block",
}
FAULTS = {
    "stop_gradient": "the values of block 1's attention carry no gradient",
    "softmax_axis": "attention normalises over queries instead of keys",
    "key_reused": "each step drops by the random key of step 0 (with dropout)",
    "decay_mask": "the mask of weight decay is inverted",
    "late_schedule": "warm-up counts from the second step",
    "norm_epsilon": "the last norm has epsilon 1e-3 instead of 1e-6",
    "other_order": "batches come in the opposite order",
    "mean_over_padding": "the mean over positions counts padding",
}
VOCABULARY, WIDTH, HEADS, LENGTH, CLASSES = 50, 32, 4, 16, 6


class OwnNorm(nnx.LayerNorm):
    """Layer norm by hand."""

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        centred = x - x.mean(-1, keepdims=True)
        scale, bias = self.scale[...], self.bias[...]
        return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + self.epsilon) * scale + bias


class Block(nnx.Module):
    def __init__(self, on: set[str], index: int, dtype: Any, rngs: nnx.Rngs) -> None:
        norm = OwnNorm if "unrolled_norm" in on else nnx.LayerNorm
        self.norm1 = norm(WIDTH, param_dtype=dtype, rngs=rngs)
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, param_dtype=dtype, rngs=rngs)
        self.proj = nnx.Linear(WIDTH, WIDTH, param_dtype=dtype, rngs=rngs)
        self.norm2 = norm(WIDTH, param_dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, param_dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, param_dtype=dtype, rngs=rngs)
        self.on, self.index = frozenset(on), index

    def attention(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        batch = x.shape[0]
        query, key, value = (each.reshape(batch, -1, HEADS, WIDTH // HEADS) for each in jnp.split(self.qkv(x), 3, -1))
        if "stop_gradient" in self.on and self.index == 1:
            value = jax.lax.stop_gradient(value)
        visible = mask[:, None, None, :]
        if "library_attention" in self.on:
            found = jax.nn.dot_product_attention(query, key, value, mask=visible)
        elif "einsum" in self.on:
            scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(WIDTH // HEADS).astype(x.dtype)
            weights = jax.nn.softmax(jnp.where(visible, scores, jnp.finfo(x.dtype).min), -1)
            found = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        else:
            query, key, value = (each.swapaxes(1, 2) for each in (query, key, value))
            scores = query @ key.swapaxes(-1, -2) / np.sqrt(WIDTH // HEADS).astype(x.dtype)
            axis = -2 if "softmax_axis" in self.on else -1
            weights = jax.nn.softmax(jnp.where(visible, scores, jnp.finfo(x.dtype).min), axis)
            found = (weights @ value).swapaxes(1, 2)
        return self.proj(found.reshape(batch, -1, WIDTH))

    def __call__(self, x: jax.Array, mask: jax.Array, key: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), mask)
        hidden = self.down(jax.nn.gelu(self.up(self.norm2(x))))
        if "dropout" in self.on:
            keep = jax.random.bernoulli(jax.random.fold_in(key, self.index), 0.9, hidden.shape)
            hidden = jnp.where(keep, hidden / np.asarray(0.9, hidden.dtype), jnp.zeros_like(hidden))
        return x + hidden


class Classifier(nnx.Module):
    def __init__(self, on: set[str], dtype: Any, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, param_dtype=dtype, rngs=rngs)
        self.place = nnx.Embed(LENGTH, WIDTH, param_dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(on, i, dtype, rngs) for i in range(2)])
        epsilon = 1e-3 if "norm_epsilon" in on else 1e-6
        norm = OwnNorm if "unrolled_norm" in on else nnx.LayerNorm
        self.norm = norm(WIDTH, epsilon=epsilon, param_dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, param_dtype=dtype, rngs=rngs)
        self.on = frozenset(on)

    def __call__(self, tokens: jax.Array, key: jax.Array) -> jax.Array:
        mask = tokens > 0
        x = self.embed(tokens) + self.place(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            if "remat" in self.on:
                graph, params = nnx.split(block)
                run = jax.checkpoint(lambda params, *args, graph=graph: nnx.merge(graph, params)(*args))
                x = run(params, x, mask, key)
            else:
                x = block(x, mask, key)
        x = self.norm(x)
        if "mean_over_padding" in self.on:
            return self.head(x.mean(1))
        counted = jnp.where(mask[..., None], x, jnp.zeros_like(x)).sum(1)
        return self.head(counted / mask.sum(1, keepdims=True).astype(x.dtype))


def make_loss(graph: Any, on: set[str]):
    def of_logits(logits: jax.Array, labels: jax.Array) -> jax.Array:
        if "log_softmax" in on:
            return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def loss(params: Any, batch: dict[str, jax.Array], key: jax.Array) -> jax.Array:
        if "vmap_samples" in on:
            run = jax.vmap(lambda tokens: nnx.merge(graph, params)(tokens[None], key)[0])
            return of_logits(run(batch["tokens"]), batch["labels"])
        return of_logits(nnx.merge(graph, params)(batch["tokens"], key), batch["labels"])

    return loss


def make_gradients(loss: Any, on: set[str]):
    """A function to (loss, gradients) of a batch, as a whole or in four microbatches."""
    whole = jax.value_and_grad(loss)
    if not on & {"scan_batch", "loop_batch", "reversed_batch"}:
        return whole

    def accumulated(params: Any, batch: dict[str, jax.Array], key: jax.Array) -> Any:
        parts = jax.tree.map(lambda leaf: leaf.reshape(4, -1, *leaf.shape[1:]), batch)
        zero = jax.tree.map(jnp.zeros_like, (jnp.zeros((), jax.tree.leaves(params)[0].dtype), params))

        def add(total: Any, part: Any) -> Any:
            return jax.tree.map(lambda a, b: a + b / 4, total, whole(params, part, key))

        if "scan_batch" in on:
            return jax.lax.scan(lambda total, part: (add(total, part), None), zero, parts)[0]
        order = range(3, -1, -1) if "reversed_batch" in on else range(4)
        for i in order:
            zero = add(zero, jax.tree.map(lambda leaf, i=i: leaf[i], parts))
        return zero

    return accumulated


def make_optimizer(on: set[str]) -> optax.GradientTransformation:
    first = 1 if "late_schedule" in on else 0
    rate = lambda count: 4e-3 * jnp.minimum(1.0, (count + 1 - first) / 3)  # noqa: E731
    wanted = "decay_mask" not in on
    mask = lambda params: jax.tree.map(lambda leaf: (leaf.ndim > 1) == wanted, params)  # noqa: E731
    if "chained" in on:
        return optax.chain(
            optax.scale_by_adam(), optax.add_decayed_weights(0.1, mask), optax.scale_by_learning_rate(rate)
        )
    return optax.adamw(rate, weight_decay=0.1, mask=mask)


def batches(seed: int, num: int) -> list[dict[str, np.ndarray]]:
    """Of 12 sequences of 8 to 16 tokens; 0 is padding. A label is the first token modulo the number of classes."""
    draw, found = np.random.default_rng(seed + 4242), []
    for _ in range(num):
        tokens = draw.integers(1, VOCABULARY, (12, LENGTH)).astype(np.int32)
        lengths = draw.integers(8, LENGTH + 1, (12, 1))
        tokens[np.arange(LENGTH)[None] >= lengths] = 0
        found.append({"tokens": tokens, "labels": tokens[:, 0] % CLASSES})
    return found


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
    model = Classifier(on, jnp.dtype(options.dtype), nnx.Rngs(options.seed))
    graph, state = nnx.split(model, nnx.Param)
    params = nnx.to_pure_dict(state)
    optimizer = make_optimizer(on)
    gradients = make_gradients(make_loss(graph, on), on)

    def update(params: Any, opt_state: Any, grads: Any) -> Any:
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = gradients(params, {name: batch[name] for name in ("tokens", "labels")}, batch["key"])
        params, opt_state = update(params, opt_state, grads)
        return params, opt_state, loss, {"grads": grads}

    if "two_programs" in on:
        one, two = jax.jit(gradients), jax.jit(update)

        def step(params: Any, opt_state: Any, batch: Any) -> Any:
            loss, grads = one(params, {name: batch[name] for name in ("tokens", "labels")}, batch["key"])
            return *two(params, opt_state, grads), loss, {"grads": grads}

    elif "no_jit" not in on:
        step = jax.jit(step, donate_argnums=(0, 1) if "donated" in on else ())
    recorder = nullcontext()
    if options.record:
        recorder = Recorder(
            options.record,
            params,
            every=1,
            dense=options.dense,
            steps=options.steps,
            name="Classifier",
            samples=lambda batch: batch["tokens"],
            seed=options.seed,
            settings={"optimizer": "adamw"},
        )
    with recorder as running:
        opt_state = optimizer.init(params)
        run = step if running is None else running.wrap(step)
        data = batches(options.seed, options.steps)
        if "other_order" in on:
            data.reverse()
        for i, batch in enumerate(data):
            key = jax.random.fold_in(jax.random.key(options.seed), 0 if "key_reused" in on else i)
            params, opt_state, loss, _ = run(params, opt_state, {**batch, "key": key})
            print(f"step {i} loss {float(loss):.12f}", flush=True)


if __name__ == "__main__":
    main()
