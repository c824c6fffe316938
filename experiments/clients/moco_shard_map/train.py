"""Trains a contrastive encoder with a momentum encoder and a queue of keys: plain JAX, jax.shard_map, an update by jax.tree.map.

python train.py [--style jit] [--automatic [--mistake]] [--accumulate 2] [--remat] [--probe]

Batches are sharded over all devices, parameters and the queue are replicated. Each query is compared with its own key and with
those in the queue, and keys of all devices enter the queue after the step. The update is SGD with momentum and weight decay.
With --automatic, jax.shard_map checks the axes of values, and jax.grad adds the gradients of replicated parameters over
devices. With --mistake the gradients that are added so are those of each device's own mean, and lax.pmean leaves them as they
are: they are multiplied by the number of devices.
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=7)
parser.add_argument("--batch", type=int, default=16, help="Images of all devices.")
parser.add_argument(
    "--style", choices=["shard_map", "jit"], default="shard_map", help="Collectives by hand, or by the compiler."
)
parser.add_argument("--automatic", action="store_true", help="Differentiate the averaged loss with check_vma.")
parser.add_argument("--accumulate", type=int, default=1, help="Parts of a device's queries.")
parser.add_argument("--remat", action="store_true", help="Compute the encoder again in backward.")
parser.add_argument(
    "--probe", action="store_true", help="Classify other images by their neighbours after every second step."
)
parser.add_argument("--mistake", action="store_true", help="Average gradients that are sums already; --automatic.")
args = parser.parse_args()

SIZE, CLASSES, WIDTH, FEATURES, QUEUE = 10, 5, 48, 16, 48
LR, MOMENTUM, DECAY, EMA, TEMPERATURE = 0.05, 0.9, 1e-3, 0.95, 0.2
by_hand = args.style == "shard_map"


def init(key):
    """Parameters of the encoder: two residual layers and a projection."""
    widths = {
        "stem": (SIZE * SIZE, WIDTH),
        "layer0": (WIDTH, WIDTH),
        "layer1": (WIDTH, WIDTH),
        "project": (WIDTH, FEATURES),
    }
    params = {}
    for name, of_layer in zip(widths, jax.random.split(key, len(widths)), strict=True):
        rows, columns = widths[name]
        params[name] = {
            "w": jax.random.normal(of_layer, (rows, columns)) / jnp.sqrt(rows),
            "b": jnp.zeros(columns),
        }
    return params


def normalized(x):
    return x / jnp.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def encode(params, images):
    """Features of unit length."""

    def dense(name, x):
        return x @ params[name]["w"] + params[name]["b"]

    x = jax.nn.gelu(dense("stem", images.reshape(len(images), -1)))
    for i in range(2):
        x = x + jax.nn.gelu(dense(f"layer{i}", x))
    return normalized(dense("project", x))


encode_queries = jax.checkpoint(encode) if args.remat else encode


def contrast(params, queries, keys, queue):
    """Mean over queries of the cross-entropy of the own key among it and the keys in the queue."""
    features = encode_queries(params, queries)
    own = (features * keys).sum(-1, keepdims=True)
    logits = jnp.concatenate([own, features @ queue.T], axis=1) / TEMPERATURE
    loss = -jax.nn.log_softmax(logits)[:, 0].mean()
    if by_hand and args.automatic and not args.mistake:
        loss = lax.pmean(loss, "data")
    return loss


def gradients(params, queries, keys, queue):
    """(loss, gradients) of a device's queries, in parts of one size."""
    value_and_grad = jax.value_and_grad(contrast)
    if args.accumulate == 1:
        return value_and_grad(params, queries, keys, queue)
    size = len(queries) // args.accumulate
    loss, grads = 0.0, jax.tree.map(jnp.zeros_like, params)
    for i in range(args.accumulate):
        part = slice(i * size, (i + 1) * size)
        part_loss, part_grads = value_and_grad(params, queries[part], keys[part], queue)
        loss = loss + part_loss / args.accumulate
        grads = jax.tree.map(lambda total, new: total + new / args.accumulate, grads, part_grads)
    return loss, grads


def learning_rate(step):
    return LR * 0.5 * (1 + jnp.cos(jnp.pi * step / (2 * args.steps)))


def train_step(state, batch):
    params = state["params"]
    keys = lax.stop_gradient(encode(state["target"], batch["key"]))
    loss, grads = gradients(params, batch["query"], keys, state["queue"])
    if by_hand:
        if not args.automatic or args.mistake:
            loss, grads = lax.pmean((loss, grads), "data")
        place = lax.axis_index("data") * len(keys)
        every = jnp.zeros((args.batch, FEATURES), keys.dtype)
        keys = lax.psum(lax.dynamic_update_slice_in_dim(every, keys, place, 0), "data")
    rate = learning_rate(state["step"])
    velocity = jax.tree.map(lambda v, g, p: MOMENTUM * v + g + DECAY * p, state["velocity"], grads, params)
    params = jax.tree.map(lambda p, v: p - rate * v, params, velocity)
    target = jax.tree.map(lambda t, p: EMA * t + (1 - EMA) * p, state["target"], params)
    queue = jnp.concatenate([keys, state["queue"][: QUEUE - args.batch]])
    return {"params": params, "velocity": velocity, "target": target, "queue": queue, "step": state["step"] + 1}, loss


templates = np.random.default_rng(100).standard_normal((CLASSES, SIZE, SIZE))


def views(random, number):
    """(classes, images, the same images moved and with other noise)."""
    classes = random.integers(CLASSES, size=number)
    images = templates[classes] * random.uniform(0.6, 1.4, (number, 1, 1))
    moved = np.stack([np.roll(image, random.integers(-1, 2, size=2), (0, 1)) for image in images])
    first = images + 0.3 * random.standard_normal(images.shape)
    second = moved + 0.3 * random.standard_normal(images.shape)
    return classes, first.astype(np.float32), second.astype(np.float32)


def batches():
    random = np.random.default_rng(1)
    for _ in range(args.steps):
        _, queries, keys = views(random, args.batch)
        yield {"query": queries, "key": keys}


@jax.jit
def similarities(params, images, others):
    return encode(params, images) @ encode(params, others).T


def probe(state, step):
    """Accuracy of the class of the nearest image."""
    classes, images, others = views(np.random.default_rng(2), 32)
    nearest = np.asarray(similarities(state["target"], images, others) - 4 * np.eye(32)).argmax(1)
    print(f"step {step} accuracy {np.mean(classes[nearest] == classes):.4f}")


def main():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharded, replicated = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    of_params, of_queue = jax.random.split(jax.random.key(0))
    params = init(of_params)
    state = {
        "params": params,
        "velocity": jax.tree.map(jnp.zeros_like, params),
        "target": jax.tree.map(jnp.copy, params),
        "queue": normalized(jax.random.normal(of_queue, (QUEUE, FEATURES))),
        "step": jnp.zeros((), jnp.int32),
    }
    state = jax.device_put(state, replicated)
    if by_hand:
        mapped = partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()))
        step_fn = jax.jit(mapped(train_step, check_vma=args.automatic))
    else:
        step_fn = jax.jit(train_step, in_shardings=(replicated, sharded), out_shardings=(replicated, replicated))
    for step, batch in enumerate(batches()):
        state, loss = step_fn(state, jax.device_put(batch, sharded))
        print(f"step {step} loss {loss.item():.9g}")
        if args.probe and step % 2 == 1:
            probe(state, step)
    for name in ("params", "target"):
        norm = jnp.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(state[name])))
        print(f"norm of {name} {norm:.9g}")
    return state


if __name__ == "__main__":
    main()
