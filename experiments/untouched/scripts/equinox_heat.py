"""Train a net of equinox to solve the heat equation: derivatives of the net in its loss, weights of boundary and start, Adamax.

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
    "base": "two microbatches in a scan, data parallel by shard_map",
    "whole": "one batch instead of two microbatches",
    "forward_mode": "derivatives in space forward over forward instead of reverse over reverse",
    "by_jit": "data parallel by jit and the batch's sharding",
    "layers_by_hand": "the arithmetic of layers written out",
}
FAULTS = {
    "microbatch_lost": "gradients of the last microbatch replace those before it",
}
WIDTH, POINTS = 16, 24


class Field(eqx.Module):
    """Place and time (2,) to temperature."""

    layers: list[eqx.nn.Linear]
    on: frozenset[str] = eqx.field(static=True)

    def __call__(self, at: jax.Array) -> jax.Array:
        for layer in self.layers[:-1]:
            at = jnp.tanh(at @ layer.weight.T + layer.bias if "layers_by_hand" in self.on else layer(at))
        last = self.layers[-1]
        return (at @ last.weight.T + last.bias if "layers_by_hand" in self.on else last(at))[0]

    def residual(self, at: jax.Array) -> jax.Array:
        """What the equation leaves at a point."""
        value = lambda x, t: self(jnp.stack([x, t]))  # noqa: E731
        by_place = jax.jacfwd(jax.jacfwd(value)) if "forward_mode" in self.on else jax.grad(jax.grad(value))
        return jax.grad(value, 1)(*at) - 0.1 * by_place(*at)


def make_model(seed: int, dtype: Any, on: set[str]) -> Field:
    keys = jax.random.split(jax.random.key(seed + 3), 3)
    sizes = [(2, WIDTH), (WIDTH, WIDTH), (WIDTH, 1)]
    model = Field([eqx.nn.Linear(*size, key=key) for size, key in zip(sizes, keys, strict=True)], frozenset(on))
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if eqx.is_array(leaf) else leaf, model)


def make_gradients(static: Any, mesh: Mesh, on: set[str]):
    """A function to (loss, gradients) of a batch over all devices."""

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        field = eqx.combine(params, static)
        inner = jnp.square(jax.vmap(field.residual)(batch["inner"])).mean()
        edge = jnp.square(jax.vmap(field)(batch["edge"])).mean()
        start = jnp.square(jax.vmap(field)(batch["start"]) - jnp.sin(jnp.pi * batch["start"][:, 0])).mean()
        return inner + 2 * edge + 5 * start

    whole = jax.value_and_grad(loss)

    def accumulated(params: Any, batch: dict[str, jax.Array]) -> Any:
        if "whole" in on:
            return whole(params, batch)
        parts = jax.tree.map(lambda leaf: leaf.reshape(2, -1, *leaf.shape[1:]), batch)
        zero = jax.tree.map(jnp.zeros_like, (jnp.zeros((), jax.tree.leaves(params)[0].dtype), params))

        def add(total: Any, part: Any) -> tuple[Any, None]:
            loss, grads = jax.tree.map(lambda leaf: leaf / 2, whole(params, part))
            if "microbatch_lost" in on:
                return (total[0] + loss, grads), None
            return jax.tree.map(jnp.add, total, (loss, grads)), None

        return lax.scan(add, zero, parts)[0]

    if "by_jit" in on:
        return accumulated

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    def run(params: Any, batch: dict[str, jax.Array]) -> Any:
        return jax.tree.map(lambda leaf: lax.pmean(leaf, "data"), accumulated(params, batch))

    return run


def batch_of(step: int, seed: int, dtype: Any) -> dict[str, np.ndarray]:
    """POINTS places and times within, POINTS / 2 at the edges, and POINTS / 2 at time 0."""
    draw = np.random.default_rng((seed, step, 1414))
    inner = draw.random((POINTS, 2))
    edge, start = draw.random((2, POINTS // 2, 2))
    edge[:, 0] = edge[:, 0] > 0.5
    start[:, 1] = 0
    points = {"inner": inner, "edge": edge, "start": start}
    return {name: each.astype(np.float32).astype(dtype) for name, each in points.items()}


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
    dtype = jnp.dtype(options.dtype)
    mesh = jax.make_mesh((options.devices,), ("data",), axis_types=(AxisType.Auto,))
    params, static = eqx.partition(make_model(options.seed, dtype, on), eqx.is_array)
    params = jax.device_put(params, NamedSharding(mesh, P()))
    gradients, optimizer = make_gradients(static, mesh, on), optax.adamax(1e-2)

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
            name="Field",
            samples=lambda batch: batch["inner"],
            learning_rate=1e-2,
            seed=options.seed,
            settings={"optimizer": "adamax"},
        )
    with recorder as running:
        opt_state = optimizer.init(params)
        run = step if running is None else running.wrap(step)
        for i in range(options.steps):
            batch = jax.device_put(batch_of(i, options.seed, dtype), NamedSharding(mesh, P("data")))
            params, opt_state, loss, _ = run(params, opt_state, batch)
            print(f"step {i} loss {float(loss):.12f}", flush=True)


if __name__ == "__main__":
    main()
