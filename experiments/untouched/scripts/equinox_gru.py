"""Train equinox's GRU cell to classify sequences, by a scan over time, with optax.

It runs under jit, on one device or data parallel over two. `--record FOLDER` records the run with `jax_backend.Recorder`.
"""

import argparse
from contextlib import nullcontext
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_backend import Recorder

CLEAN = {
    "base": "a scan over time, data parallel by shard_map",
    "loop": "a loop of Python over time",
    "by_jit": "data parallel by jit and the batch's sharding",
    "cell_by_hand": "the arithmetic of the cell written out",
}
FAULTS = {
    "psum": "gradients are summed over devices instead of averaged",
}
VOCABULARY, WIDTH, HIDDEN, CLASSES, LENGTH = 40, 12, 16, 4, 10


class Reader(eqx.Module):
    """Tokens (LENGTH,), of which 0 is padding, to logits (CLASSES,)."""

    embed: jax.Array
    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear
    on: frozenset[str] = eqx.field(static=True)

    def step(self, hidden: jax.Array, given: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        token, x = given
        after = by_hand(self.cell, x, hidden) if "cell_by_hand" in self.on else self.cell(x, hidden)
        return jnp.where(token > 0, after, hidden), None

    def __call__(self, tokens: jax.Array) -> jax.Array:
        inputs = tokens, self.embed[tokens]
        hidden = jnp.zeros(HIDDEN, self.embed.dtype)
        step = lambda hidden, given: self.step(hidden, given)  # noqa: E731
        if "loop" in self.on:
            for i in range(LENGTH):
                hidden, _ = step(hidden, jax.tree.map(lambda leaf, i=i: leaf[i], inputs))
        else:
            hidden, _ = lax.scan(step, hidden, inputs)
        return self.head(hidden)


def by_hand(cell: eqx.nn.GRUCell, x: jax.Array, hidden: jax.Array) -> jax.Array:
    enter = jnp.split(cell.weight_ih @ x + cell.bias, 3)
    recur = jnp.split(cell.weight_hh @ hidden, 3)
    reset, update = jax.nn.sigmoid(enter[0] + recur[0]), jax.nn.sigmoid(enter[1] + recur[1])
    new = jnp.tanh(enter[2] + reset * (recur[2] + cell.bias_n))
    return update * hidden + (1 - update) * new


def make_model(seed: int, dtype: Any, on: set[str]) -> Reader:
    first, second, third = jax.random.split(jax.random.key(seed + 8), 3)
    embed = jax.random.normal(first, (VOCABULARY, WIDTH))
    model = Reader(
        embed, eqx.nn.GRUCell(WIDTH, HIDDEN, key=second), eqx.nn.Linear(HIDDEN, CLASSES, key=third), frozenset(on)
    )
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if eqx.is_array(leaf) else leaf, model)


def make_loss(static: Any):
    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        logits = jax.vmap(eqx.combine(params, static))(batch["tokens"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    return loss


def make_gradients(static: Any, mesh: Mesh, on: set[str]):
    """A function to (loss, gradients) of a batch over all devices."""
    if "by_jit" in on:
        return jax.value_and_grad(make_loss(static))
    local = jax.value_and_grad(make_loss(static))

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    def run(params: Any, batch: dict[str, jax.Array]) -> Any:
        loss, grads = local(params, batch)
        reduce = lax.psum if "psum" in on else lax.pmean
        return lax.pmean(loss, "data"), jax.tree.map(lambda grad: reduce(grad, "data"), grads)

    return run


def batch_of(step: int, seed: int) -> dict[str, np.ndarray]:
    """12 sequences with padding at their end; a label is the first token modulo the number of classes."""
    draw = np.random.default_rng((seed, step, 577))
    tokens = draw.integers(1, VOCABULARY, (12, LENGTH)).astype(np.int32)
    tokens[np.arange(LENGTH)[None] >= draw.integers(5, LENGTH + 1, (12, 1))] = 0
    return {"tokens": tokens, "labels": tokens[:, 0] % CLASSES}


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
    mesh = jax.make_mesh((options.devices,), ("data",), axis_types=(AxisType.Auto,))
    params, static = eqx.partition(make_model(options.seed, jnp.dtype(options.dtype), on), eqx.is_array)
    params = jax.device_put(params, NamedSharding(mesh, P()))
    gradients, optimizer = make_gradients(static, mesh, on), optax.adamw(5e-3, weight_decay=0.05)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = gradients(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, {"grads": grads}

    step = jax.jit(step)
    recorder = nullcontext()
    if options.record:
        recorder = Recorder(
            options.record,
            params,
            mesh=mesh,
            every=1,
            dense=options.dense,
            steps=options.steps,
            name="Reader",
            samples=lambda batch: batch["tokens"],
            learning_rate=5e-3,
            seed=options.seed,
            settings={"optimizer": "adamw"},
        )
    with recorder as running:
        opt_state = optimizer.init(params)
        run = step if running is None else running.wrap(step)
        for i in range(options.steps):
            batch = jax.device_put(batch_of(i, options.seed), NamedSharding(mesh, P("data")))
            params, opt_state, loss, _ = run(params, opt_state, batch)
            print(f"step {i} loss {float(loss):.12f}", flush=True)


if __name__ == "__main__":
    main()
