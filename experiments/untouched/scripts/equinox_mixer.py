"""Train a small MLP-mixer of equinox with optax, on one device or data parallel over several, by shard_map or by jit.

`--record FOLDER` records the run with `jax_backend.Recorder`.
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
    "base": "data parallel by shard_map, parameters on every device",
    "by_jit": "data parallel by jit and the batch's sharding",
    "fsdp": "parameters cut over devices by NamedSharding, by jit",
    "scan_layers": "a scan over stacked blocks instead of a loop",
    "filter_jit": "equinox's filter_jit and filter_value_and_grad",
    "remat": "each block's forward is computed again in backward",
    "sum_over_count": "sums of losses and gradients over their number instead of means",
    "inlined_norm": "layer norm by hand",
    "matmul": "products with matrices over the whole batch instead of under vmap",
    "adam_by_hand": "the rule of Adam written out instead of optax",
    "clip_global": "optax.clip_by_global_norm of a norm that is never reached",
}
FAULTS = {
    "psum": "gradients are summed over devices instead of averaged",
    "no_pmean": "gradients of one weight are not averaged over devices",
    "wrong_axis": "the first mixing goes over channels of the wrong reshape",
    "head_scaled": "the loss divides logits by 2",
    "update_twice": "updates of the optimizer are applied twice to one weight",
    "b2_swapped": "Adam's betas are given in the opposite order",
    "donated_stale": "from step 2 on the step is given the parameters of one step before",
    "half_gelu": "GELU of block 0 computes in float16",
}
PATCHES, WIDTH, CLASSES, BLOCKS = 9, 24, 5, 2


class Norm(eqx.Module):
    weight: jax.Array
    bias: jax.Array
    by_hand: bool = eqx.field(static=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        mean = x.mean(-1, keepdims=True)
        if self.by_hand:
            var = jnp.square(x - mean).mean(-1, keepdims=True)
            return (x - mean) * lax.rsqrt(var + 1e-5) * self.weight + self.bias
        return (x - mean) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5) * self.weight + self.bias


class Dense(eqx.Module):
    weight: jax.Array
    bias: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.weight.T + self.bias


class Block(eqx.Module):
    norm1: Norm
    tokens: Dense
    norm2: Norm
    up: Dense
    down: Dense
    on: frozenset[str] = eqx.field(static=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., patches, width) to the same."""
        mixed = self.norm1(x)
        if "wrong_axis" in self.on:
            turned = mixed.reshape(*mixed.shape[:-2], WIDTH, PATCHES)
        else:
            turned = mixed.swapaxes(-1, -2)
        x = x + self.tokens(turned).swapaxes(-1, -2)
        hidden = self.up(self.norm2(x))
        if "half_gelu" in self.on:
            hidden = jax.nn.gelu(hidden.astype(jnp.float16)).astype(hidden.dtype)
        else:
            hidden = jax.nn.gelu(hidden)
        return x + self.down(hidden)


class Mixer(eqx.Module):
    """Patches (..., patches, 12) to logits (..., classes)."""

    embed: Dense
    blocks: list[Block]
    norm: Norm
    head: Dense
    on: frozenset[str] = eqx.field(static=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.embed(x)
        if "scan_layers" in self.on:
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *self.blocks)
            x, _ = lax.scan(lambda x, block: (block(x), None), x, stacked)
        else:
            for block in self.blocks:
                x = jax.checkpoint(lambda block, x: block(x))(block, x) if "remat" in self.on else block(x)
        logits = self.head(self.norm(x).mean(-2))
        return logits / 2 if "head_scaled" in self.on else logits


def make_model(seed: int, dtype: Any, on: set[str]) -> Mixer:
    draw = np.random.default_rng(seed + 99)

    def values(*shape: int) -> jax.Array:
        return jnp.asarray((draw.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32), dtype)

    def dense(fan_in: int, fan_out: int) -> Dense:
        return Dense(values(fan_out, fan_in), jnp.zeros(fan_out, dtype))

    def norm() -> Norm:
        return Norm(jnp.ones(WIDTH, dtype), jnp.zeros(WIDTH, dtype), "inlined_norm" in on)

    def block(index: int) -> Block:
        marks = frozenset(on - ({"half_gelu", "wrong_axis"} if index else set()))
        return Block(norm(), dense(PATCHES, PATCHES), norm(), dense(WIDTH, 48), dense(48, WIDTH), marks)

    blocks = [block(i) for i in range(BLOCKS)]
    return Mixer(dense(12, WIDTH), blocks, norm(), dense(WIDTH, CLASSES), frozenset(on))


def make_loss(static: Any, on: set[str], *, sums: bool = False):
    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        model = eqx.combine(params, static)
        logits = model(batch["x"]) if "matmul" in on else jax.vmap(model)(batch["x"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return losses.sum() if sums else losses.mean()

    return loss


def make_gradients(static: Any, mesh: Mesh, on: set[str]):
    """A function to (loss, gradients) of a batch over all devices."""
    if on & {"by_jit", "fsdp"}:
        return jax.value_and_grad(make_loss(static, on))
    if "filter_jit" in on and mesh.size == 1:
        return eqx.filter_value_and_grad(make_loss(static, on))
    sums = "sum_over_count" in on
    local = jax.value_and_grad(make_loss(static, on, sums=sums))

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    def run(params: Any, batch: dict[str, jax.Array]) -> Any:
        loss, grads = local(params, batch)
        if sums:
            count = lax.psum(jnp.asarray(len(batch["y"]), loss.dtype), "data")
            return jax.tree.map(lambda leaf: lax.psum(leaf, "data") / count, (loss, grads))
        averaged = jax.tree.map(lambda grad: lax.pmean(grad, "data"), grads)
        if "psum" in on:
            averaged = jax.tree.map(lambda grad: lax.psum(grad, "data"), grads)
        if "no_pmean" in on:
            averaged = eqx.tree_at(lambda tree: tree.blocks[1].up.weight, averaged, grads.blocks[1].up.weight)
        return lax.pmean(loss, "data"), averaged

    return run


def adam_by_hand(rate: float, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> optax.GradientTransformation:
    """Adam in the state of optax."""

    def init(params: Any) -> optax.ScaleByAdamState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), zeros, zeros)

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        count = state.count + 1
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, grads)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, grads)

        def step(m: jax.Array, v: jax.Array) -> jax.Array:
            first, second = ((1 - b**count).astype(m.dtype) for b in (b1, b2))
            return -rate * (m / first) / (jnp.sqrt(v / second) + eps)

        return jax.tree.map(step, mu, nu), optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def make_optimizer(on: set[str]) -> optax.GradientTransformation:
    if "adam_by_hand" in on:
        return adam_by_hand(3e-3)
    adam = optax.adam(3e-3, b1=0.999, b2=0.9) if "b2_swapped" in on else optax.adam(3e-3)
    return optax.chain(optax.clip_by_global_norm(1e6), adam) if "clip_global" in on else adam


def batch_of(step: int, seed: int, dtype: Any) -> dict[str, np.ndarray]:
    """12 samples of 9 patches."""
    draw = np.random.default_rng((seed, step, 31337))
    x = draw.standard_normal((12, PATCHES, 12)).astype(np.float32).astype(dtype)
    return {"x": x, "y": draw.integers(0, CLASSES, 12).astype(np.int32)}


def place(params: Any, mesh: Mesh, on: set[str]) -> Any:
    def sharding(leaf: jax.Array) -> NamedSharding:
        cut = "fsdp" in on and leaf.shape[0] % mesh.size == 0
        return NamedSharding(mesh, P("data") if cut else P())

    return jax.tree.map(lambda leaf: jax.device_put(leaf, sharding(leaf)), params)


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
    dtype = jnp.dtype(options.dtype)
    params, static = eqx.partition(make_model(options.seed, dtype, on), eqx.is_array)
    params = place(params, mesh, on)
    gradients, optimizer = make_gradients(static, mesh, on), make_optimizer(on)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = gradients(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates)
        if "update_twice" in on:
            twice = lambda tree: tree.blocks[2].down.weight  # noqa: E731
            new = eqx.tree_at(twice, new, twice(new) + twice(updates))
        return new, opt_state, loss, {"grads": grads}

    step = eqx.filter_jit(step) if "filter_jit" in on else jax.jit(step)
    recorder = nullcontext()
    if options.record:
        recorder = Recorder(
            options.record,
            params,
            mesh=mesh,
            every=1,
            dense=options.dense,
            steps=options.steps,
            name="Mixer",
            samples=lambda batch: batch["x"],
            learning_rate=3e-3,
            seed=options.seed,
            settings={"optimizer": "adam"},
        )
    with recorder as running:
        opt_state, before = optimizer.init(params), params
        run = step if running is None else running.wrap(step)
        for i in range(options.steps):
            batch = jax.device_put(batch_of(i, options.seed, dtype), NamedSharding(mesh, P("data")))
            given = before if "donated_stale" in on and i >= 2 else params
            before = params
            params, opt_state, loss, _ = run(given, opt_state, batch)
            print(f"step {i} loss {float(loss):.12f}", flush=True)


if __name__ == "__main__":
    main()
