"""Trains a small residual net of flax with batch norm and dropout in one lax.scan over steps, with Muon of optax.

python train.py [--loop] [--accumulate 2] [--dropout 0] [--remat] [--mistake]
"""

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument(
    "--loop", action="store_true", help="Call a jitted step in a loop of Python instead of scanning over steps."
)
parser.add_argument(
    "--accumulate", type=int, default=1, help="Parts of a batch, by optax.MultiSteps; needs --norm group."
)
parser.add_argument("--norm", choices=["batch", "group"], default="batch")
parser.add_argument("--dropout", type=float, default=0.2)
parser.add_argument("--remat", action="store_true", help="Compute blocks again in backward.")
parser.add_argument("--no-average", action="store_true")
parser.add_argument("--mistake", action="store_true", help="The new running statistics do not reach the state.")
args = parser.parse_args()

CLASSES, WIDTH = 10, 16


class Block(nn.Module):
    train: bool

    @nn.compact
    def __call__(self, x):
        y = x
        for _ in range(2):
            if args.norm == "batch":
                y = nn.BatchNorm(use_running_average=not self.train, momentum=0.9)(y)
            else:
                y = nn.GroupNorm(num_groups=4)(y)
            y = nn.Conv(WIDTH, (3, 3), use_bias=False)(nn.relu(y))
        return x + nn.Dropout(args.dropout, deterministic=not self.train)(y)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        block = nn.remat(Block) if args.remat else Block
        x = nn.Conv(WIDTH, (3, 3), strides=2)(x)
        for i in range(2):
            x = block(train, name=f"block{i}")(x)
        return nn.Dense(CLASSES)(x.mean((1, 2)))


class TrainState(train_state.TrainState):
    batch_stats: Any
    key: jax.Array
    average: Any


def batches(number: int, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    templates = np.random.default_rng(100).standard_normal((CLASSES, 16, 16, 1))
    labels = random.integers(CLASSES, size=(number, args.batch // args.accumulate), dtype=np.int32)
    images = templates[labels] + 0.5 * random.standard_normal((*labels.shape, 16, 16, 1)) + 1.0
    return {"image": images.astype(np.float32), "label": labels}


def train_step(state, batch):
    key = jax.random.fold_in(state.key, state.step)

    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(variables, batch["image"], True, mutable=["batch_stats"], rngs={"dropout": key})
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), new.get("batch_stats", {})

    (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads)
    if not args.mistake:
        state = state.replace(batch_stats=batch_stats)
    if not args.no_average:
        state = state.replace(average=optax.incremental_update(state.params, state.average, 0.1))
    return state, loss


@jax.jit
def evaluate(state, params, batch):
    logits = state.apply_fn({"params": params, "batch_stats": state.batch_stats}, batch["image"], False)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


@partial(jax.jit, donate_argnums=0)
def train(state, data):
    return jax.lax.scan(train_step, state, data)


def main() -> None:
    net = Net()
    number = args.steps * args.accumulate
    data = batches(number, 1)
    seen = jax.tree.map(lambda x: x[0], batches(1, 2))
    variables = net.init(jax.random.key(0), jnp.asarray(data["image"][0]), False)
    schedule = optax.warmup_cosine_decay_schedule(0.001, 0.004, 2, 2 * args.steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.contrib.muon(schedule, adam_b1=0.9, weight_decay=0.01))
    if args.accumulate > 1:
        tx = optax.MultiSteps(tx, args.accumulate)
    params = variables["params"]
    state = TrainState.create(
        apply_fn=net.apply,
        params=params,
        tx=tx,
        batch_stats=variables.get("batch_stats", {}),
        key=jax.random.key(1),
        average=jax.tree.map(jnp.copy, params),
    )
    if args.loop:
        step_fn = jax.jit(train_step)
        losses = []
        for i in range(number):
            state, loss = step_fn(state, jax.tree.map(lambda x, i=i: x[i], data))
            losses.append(loss)
    else:
        state, losses = train(state, jax.tree.map(jnp.asarray, data))
    for step, loss in enumerate(np.asarray(losses).reshape(args.steps, -1).mean(1)):
        print(f"step {step} loss {loss:.9g}")
    print(
        f"evaluation {evaluate(state, state.params, seen):.9g} of the average {evaluate(state, state.average, seen):.9g}"
    )


if __name__ == "__main__":
    main()
