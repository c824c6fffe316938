"""Train the small decoder of `decoder_torch.py` in flax (nnx), over shards of `jax_backend`.

`--record FOLDER` records the run, the inside of its steps included. A map of parameters pairs the names of both models.
"""

import argparse
import math
import zlib
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from crossframe import MeshSpec
from crossframe.names import ParamMap, embedding, linear, norm
from jax_backend import Recorder, apply_updates, make_mesh, shard, sharded_optimizer, value_and_grad
from jax_backend.nnx import split, watch, with_params
from jax_backend.recorder import module_paths
from jax_backend.tree import path_name

CLEAN = {
    "base": "matrix products for attention",
    "einsum": "attention by einsum",
    "library_attention": "attention by jax.nn.dot_product_attention",
    "log_softmax": "the loss by hand from log_softmax",
    "stacked_rotary": "rotary positions by rotating halves",
    "float_mask": "the mask is added instead of selected by",
    "chained": "AdamW as a chain of optax's parts",
    "per_param": "every parameter is cut by rows, as FSDP2 does",
}
FAULTS = {
    "transposed_out": "the output projection of layer 1 keeps torch's order of axes",
    "rotary_base": "rotary base 1000 instead of 10000",
    "head_layout": "heads are the inner dim of queries, keys and values",
    "eps_root": "epsilon of AdamW is added under the root",
    "no_scale": "scores are not scaled by the width of a head",
    "stop_gradient": "the gate of layer 2 carries no gradient",
    "lost_decay": "Adam instead of AdamW",
}
VOCABULARY, WIDTH, HEADS, MLP, LAYERS, CONTEXT = 68, 32, 4, 64, 3, 18
EPSILON = 1e-5


def initial(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """The value with which a parameter begins, in float32, by torch's name and shape."""
    if "norm" in name:
        return np.ones(shape, np.float32)
    draw = np.random.default_rng((zlib.crc32(name.encode()), seed))
    return (draw.standard_normal(shape) / math.sqrt(shape[-1])).astype(np.float32)


def tokens_of(step: int, seed: int) -> np.ndarray:
    """(6, CONTEXT + 1): each token is a fixed function of the two before it, with noise."""
    draw = np.random.default_rng((seed, step, 271828))
    tokens = draw.integers(0, VOCABULARY, (6, CONTEXT + 1))
    for i in range(2, CONTEXT + 1):
        follows = (3 * tokens[:, i - 1] + tokens[:, i - 2]) % VOCABULARY
        tokens[:, i] = np.where(draw.random(6) < 0.8, follows, tokens[:, i])
    return tokens


def param_map() -> ParamMap:
    """torch's names of the parameters and where they are here."""
    entries = [*embedding("embed.weight".removesuffix(".weight"), "embed")]
    for i in range(LAYERS):
        layer = f"layers.{i}"
        entries += norm(f"{layer}.norm1", f"{layer}.norm1", bias=False)
        for part in ("query", "key", "value", "out"):
            entries += linear(f"{layer}.attention.{part}", f"{layer}.attention.{part}", bias=False)
        entries += norm(f"{layer}.norm2", f"{layer}.norm2", bias=False)
        for part in ("gate", "up", "down"):
            entries += linear(f"{layer}.mlp.{part}", f"{layer}.mlp.{part}", bias=False)
    return ParamMap((*entries, *norm("norm", "norm", bias=False), *linear("head", "head", bias=False)))


class Norm(nnx.Module):
    def __init__(self, dtype: Any) -> None:
        self.scale = nnx.Param(jnp.ones(WIDTH, dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        mean = jnp.square(x).mean(-1, keepdims=True)
        return x * jax.lax.rsqrt(mean + jnp.asarray(EPSILON, x.dtype)) * self.scale[...]


def turn(x: jax.Array, on: frozenset[str]) -> jax.Array:
    """Rotary positions on (batch, head, time, width), whose pairs are its halves."""
    width = WIDTH // HEADS
    rates = (1000.0 if "rotary_base" in on else 10000.0) ** (-np.arange(0, width, 2) / width)
    turned = np.arange(CONTEXT)[:, None] * rates
    cos, sin = (jnp.asarray(each(turned), x.dtype) for each in (np.cos, np.sin))
    first, second = jnp.split(x, 2, -1)
    if "stacked_rotary" in on:
        twice = lambda each: jnp.concatenate([each, each], -1)  # noqa: E731
        return x * twice(cos) + jnp.concatenate([-second, first], -1) * twice(sin)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


class Attention(nnx.Module):
    def __init__(self, on: frozenset[str], dtype: Any, rngs: nnx.Rngs) -> None:
        make = lambda: nnx.Linear(WIDTH, WIDTH, use_bias=False, param_dtype=dtype, rngs=rngs)  # noqa: E731
        self.query, self.key, self.value, self.out = make(), make(), make(), make()
        self.on = on

    def heads(self, x: jax.Array) -> jax.Array:
        if "head_layout" in self.on:
            return x.reshape(*x.shape[:-1], WIDTH // HEADS, HEADS).transpose(0, 3, 1, 2)
        return x.reshape(*x.shape[:-1], HEADS, WIDTH // HEADS).swapaxes(1, 2)

    def __call__(self, x: jax.Array) -> jax.Array:
        query, key, value = (self.heads(part(x)) for part in (self.query, self.key, self.value))
        query, key = turn(query, self.on), turn(key, self.on)
        visible = np.tril(np.ones((CONTEXT, CONTEXT), bool))
        scale = 1.0 if "no_scale" in self.on else 1 / math.sqrt(WIDTH // HEADS)
        if "library_attention" in self.on:
            turned = (each.swapaxes(1, 2) for each in (query, key, value))
            found = jax.nn.dot_product_attention(*turned, is_causal=True, scale=scale).swapaxes(1, 2)
        else:
            if "einsum" in self.on:
                scores = jnp.einsum("bhqd,bhkd->bhqk", query, key) * scale
            else:
                scores = query @ key.swapaxes(-1, -2) * scale
            if "float_mask" in self.on:
                scores = scores + jnp.where(visible, 0, jnp.finfo(x.dtype).min / 2).astype(x.dtype)
            else:
                scores = jnp.where(visible, scores, -jnp.inf)
            found = jax.nn.softmax(scores, -1) @ value
        return self.out(found.swapaxes(1, 2).reshape(x.shape))


class Feedforward(nnx.Module):
    def __init__(self, stops: bool, dtype: Any, rngs: nnx.Rngs) -> None:
        self.gate = nnx.Linear(WIDTH, MLP, use_bias=False, param_dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(WIDTH, MLP, use_bias=False, param_dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(MLP, WIDTH, use_bias=False, param_dtype=dtype, rngs=rngs)
        self.stops = stops

    def __call__(self, x: jax.Array) -> jax.Array:
        gate = self.gate(x)
        return self.down(jax.nn.silu(jax.lax.stop_gradient(gate) if self.stops else gate) * self.up(x))


class Layer(nnx.Module):
    def __init__(self, on: frozenset[str], index: int, dtype: Any, rngs: nnx.Rngs) -> None:
        self.norm1, self.attention = Norm(dtype), Attention(on, dtype, rngs)
        self.norm2, self.mlp = Norm(dtype), Feedforward("stop_gradient" in on and index == 2, dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nnx.Module):
    """Tokens (batch, CONTEXT) to logits (batch, CONTEXT, VOCABULARY)."""

    def __init__(self, on: frozenset[str], dtype: Any, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, param_dtype=dtype, rngs=rngs)
        self.layers = nnx.List([Layer(on, i, dtype, rngs) for i in range(LAYERS)])
        self.norm = Norm(dtype)
        self.head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, param_dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def with_initial(params: Any, names: ParamMap, seed: int, on: set[str]) -> Any:
    def value(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        where = path_name(path)
        entry = names.by_path[where]
        values = initial(entry.name, entry.canonical_shape(leaf.shape), seed)
        if "transposed_out" in on and where == "layers.1.attention.out.kernel":
            return jnp.asarray(values, leaf.dtype)
        return jnp.asarray(entry.from_canonical(values, where), leaf.dtype)

    return jax.tree_util.tree_map_with_path(value, params)


def make_optimizer(on: set[str]) -> optax.GradientTransformation:
    if "eps_root" in on:
        return optax.adamw(3e-3, eps=0.0, eps_root=1e-8, weight_decay=0.1)
    if "lost_decay" in on:
        return optax.adam(3e-3)
    if "chained" in on:
        return optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.1), optax.scale(-3e-3))
    return optax.adamw(3e-3, weight_decay=0.1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", default="base", help="names joined by +")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--record", default="", help="folder of a recording")
    parser.add_argument("--dense", type=int, default=4)
    options = parser.parse_args()
    on = set(options.variant.split("+"))
    assert on <= CLEAN.keys() | FAULTS.keys(), on
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.devices)
    jax.config.update("jax_enable_x64", options.dtype == "float64")
    names, mesh = param_map(), make_mesh(MeshSpec(shard=options.devices))
    graph, params, _ = split(Decoder(frozenset(on), jnp.dtype(options.dtype), nnx.Rngs(0)))
    params = with_initial(params, names, options.seed, on)
    units = tuple(f"layers.{i}" for i in range(LAYERS))
    layout = "per_param" if "per_param" in on else "flat"
    params = shard(params, mesh, units=units, param_map=names, layout=layout)
    paths = module_paths(names, units)

    def loss_fn(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        model = with_params(graph, params)
        watch(model, paths)
        logits = model(batch["tokens"])
        if "log_softmax" in on:
            return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][..., None], -1).mean()
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    optimizer = sharded_optimizer(make_optimizer(on))
    recorder = nullcontext()
    if options.record:
        recorder = Recorder(
            options.record,
            params,
            every=1,
            dense=options.dense,
            steps=options.steps,
            name="Decoder",
            samples=lambda batch: batch["tokens"],
            learning_rate=3e-3,
            seed=options.seed,
            settings={"optimizer": "AdamW", "weight_decay": 0.1, "betas": [0.9, 0.999], "eps": 1e-8},
        )

    @jax.jit
    def update(params: Any, opt_state: Any, grads: Any) -> Any:
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return apply_updates(params, updates), opt_state

    with recorder as running:
        if running is None:
            gradients = value_and_grad(loss_fn, mesh)
        else:
            params, gradients = running.params, running.value_and_grad(loss_fn)
        opt_state = optimizer.init(params)
        for i in range(options.steps):
            tokens = tokens_of(i, options.seed).astype(np.int32)
            batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
            result = gradients(params, batch)
            params, opt_state = update(params, opt_state, result.grads)
            if running is not None:
                running.step(params=params, grads=result.grads, loss=result.losses, opt_state=opt_state, batch=batch)
            print(f"step {i} loss {float(result.loss):.12f}", flush=True)


if __name__ == "__main__":
    main()
