"""Trains a small residual net of flax.linen with batch norm, data parallel by jax.shard_map, collectives written by hand.

python train.py [--style jit] [--automatic] [--norm group [--accumulate 2 [--unrolled]]] [--mistake]

Batches are sharded over all devices, parameters are replicated, and gradients are averaged by lax.pmean. Batch norm has the name
of the mesh axis, so that it normalizes over the whole batch. With --mistake it lacks the name: each device normalizes its own
images. Running statistics are still averaged after the step, so that all devices have the same.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--batch", type=int, default=16, help="Images of all devices.")
parser.add_argument(
    "--style", choices=["shard_map", "jit"], default="shard_map", help="Collectives by hand, or by the compiler."
)
parser.add_argument(
    "--automatic", action="store_true", help="Differentiate the averaged loss with check_vma, which adds gradients up."
)
parser.add_argument("--norm", choices=["batch", "group"], default="batch")
parser.add_argument("--accumulate", type=int, default=1, help="Microbatches of a device, by lax.scan; --norm group.")
parser.add_argument("--unrolled", action="store_true", help="A loop of Python over microbatches.")
parser.add_argument("--mistake", action="store_true", help="Batch norm without the name of the axis.")
args = parser.parse_args()

CLASSES, SIZE, WIDTH = 6, 12, 12


class Norm(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        if args.norm == "group":
            return nn.GroupNorm(num_groups=4)(x)
        axis = "data" if args.style == "shard_map" and train and not args.mistake else None
        return nn.BatchNorm(use_running_average=not train, momentum=0.9, axis_name=axis)(x)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(WIDTH, (3, 3), strides=2, use_bias=False, name="stem")(x)
        x = nn.relu(Norm(name="norm0")(x, train))
        y = nn.Conv(WIDTH, (3, 3), use_bias=False, name="conv1")(x)
        y = nn.relu(Norm(name="norm1")(y, train))
        y = nn.Conv(WIDTH, (3, 3), use_bias=False, name="conv2")(y)
        x = nn.relu(x + Norm(name="norm2")(y, train))
        return nn.Dense(CLASSES, name="head")(x.mean((1, 2)))


class TrainState(train_state.TrainState):
    batch_stats: Any


def batches(steps: int) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    templates = random.standard_normal((CLASSES, SIZE, SIZE, 3))
    found = []
    for _ in range(steps):
        labels = random.integers(CLASSES, size=args.batch, dtype=np.int32)
        # Brightness differs from image to image, so that statistics of halves of a batch differ.
        images = templates[labels] * random.uniform(0.3, 1.5, (args.batch, 1, 1, 1))
        images += 0.5 * random.standard_normal(images.shape) + random.uniform(-1, 1, (args.batch, 1, 1, 1))
        found.append({"image": images.astype(np.float32), "label": labels})
    return found


def loss_fn(params, state, batch):
    variables = {"params": params, "batch_stats": state.batch_stats}
    logits, new = state.apply_fn(variables, batch["image"], True, mutable=["batch_stats"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    if args.automatic:
        loss = lax.pmean(loss, "data")
    return loss, new.get("batch_stats", {})


def gradients(state, batch):
    """(loss, new running statistics, gradients) of a device's images, in microbatches."""
    value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
    if args.accumulate == 1:
        (loss, stats), grads = value_and_grad(state.params, state, batch)
        return loss, stats, grads

    def add(total, part):
        (loss, stats), grads = value_and_grad(state.params, state, part)
        return jax.tree.map(jnp.add, total, (loss, grads)), stats

    parts = jax.tree.map(lambda x: x.reshape(args.accumulate, -1, *x.shape[1:]), batch)
    total = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
    if args.unrolled:
        for i in range(args.accumulate):
            total, stats = add(total, jax.tree.map(lambda x, i=i: x[i], parts))
    else:
        total, stats = lax.scan(add, total, parts)
    loss, grads = jax.tree.map(lambda x: x / args.accumulate, total)
    return loss, stats, grads


def train_step(state, batch):
    loss, stats, grads = gradients(state, batch)
    if args.style == "shard_map" and not args.automatic:
        loss, grads, stats = lax.pmean((loss, grads, stats), "data")
    return state.apply_gradients(grads=grads, batch_stats=stats), loss


def main():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharded, replicated = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    net = Net()
    variables = net.init(jax.random.key(0), jnp.zeros((1, SIZE, SIZE, 3)), False)
    schedule = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 2, args.steps + 2)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))
    state = TrainState.create(
        apply_fn=net.apply, params=variables["params"], tx=tx, batch_stats=variables.get("batch_stats", {})
    )
    state = jax.device_put(state, replicated)
    if args.style == "shard_map":
        step_fn = jax.jit(
            jax.shard_map(
                train_step, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()), check_vma=args.automatic
            )
        )
    else:
        step_fn = jax.jit(train_step, in_shardings=(replicated, sharded), out_shardings=(replicated, replicated))
    for step, batch in enumerate(batches(args.steps)):
        state, loss = step_fn(state, jax.device_put(batch, sharded))
        print(f"step {step} loss {loss.item():.9g}")
    return state


if __name__ == "__main__":
    main()
