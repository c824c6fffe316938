"""Learns embeddings of random images by triplets: one encoder of flax.nnx for anchor, positive and negative, with optax.

python train.py [--mode jit|nnx|eager] [--order interleaved|negative_first|stacked] [--accumulate 2 [--multisteps]] [--mistake]
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--batch", type=int, default=8, help="Triplets per step.")
parser.add_argument("--mode", choices=["jit", "nnx", "eager"], default="jit", help="jax.jit, nnx.jit or neither.")
parser.add_argument(
    "--order",
    choices=["plain", "interleaved", "negative_first", "stacked"],
    default="plain",
    help="Order of the statements of the loss, or one call of the encoder for all images.",
)
parser.add_argument("--accumulate", type=int, default=1, help="Number of microbatches per step.")
parser.add_argument("--multisteps", action="store_true", help="Accumulate by optax.MultiSteps instead of in the step.")
parser.add_argument("--mistake", action="store_true", help="Do not standardize the negatives.")
args = parser.parse_args()

SIZE, CLASSES, EMBEDDING = 12, 6, 8
PIXEL_MEAN, PIXEL_STD = 0.45, 0.22


class Encoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 8, kernel_size=(3, 3), strides=(2, 2), rngs=rngs)
        self.norm1 = nnx.LayerNorm(8, rngs=rngs)
        self.conv2 = nnx.Conv(8, 16, kernel_size=(3, 3), strides=(2, 2), rngs=rngs)
        self.norm2 = nnx.LayerNorm(16, rngs=rngs)

    def __call__(self, x):
        x = nnx.gelu(self.norm1(self.conv1(x)))
        x = nnx.gelu(self.norm2(self.conv2(x)))
        return x.reshape(len(x), -1)


class TripletNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.encoder = Encoder(rngs)
        self.head = nnx.Linear((SIZE // 4) ** 2 * 16, EMBEDDING, rngs=rngs)


def scaled(pixels):
    return pixels.astype(jnp.float32) / 255.0


def standardized(pixels):
    return (scaled(pixels) - PIXEL_MEAN) / PIXEL_STD


def embed(net, images):
    z = net.head(net.encoder(images))
    return z / jnp.sqrt(jnp.sum(z**2, axis=-1, keepdims=True) + 1e-6)


def distance(a, b):
    return jnp.sum((a - b) ** 2, axis=-1)


def triplet_loss(net, batch):
    """Soft-margin loss: log(1 + exp(d(anchor, positive) - d(anchor, negative)))."""
    anchor, positive = standardized(batch["anchor"]), standardized(batch["positive"])
    negative = scaled(batch["negative"]) if args.mistake else standardized(batch["negative"])
    if args.order == "interleaved":
        a = embed(net, anchor)
        near = distance(a, embed(net, positive))
        far = distance(a, embed(net, negative))
    elif args.order == "negative_first":
        n = embed(net, negative)
        p = embed(net, positive)
        a = embed(net, anchor)
        far, near = distance(a, n), distance(a, p)
    elif args.order == "stacked":
        a, p, n = jnp.split(embed(net, jnp.concatenate([anchor, positive, negative])), 3)
        near, far = distance(a, p), distance(a, n)
    else:
        a = embed(net, anchor)
        p = embed(net, positive)
        n = embed(net, negative)
        near, far = distance(a, p), distance(a, n)
    return jnp.mean(jax.nn.softplus(near - far))


def train_step(net, optimizer, batch):
    parts = 1 if args.multisteps else args.accumulate
    size = len(batch["anchor"]) // parts
    loss, grads = 0.0, None
    for i in range(parts):
        part = {name: images[i * size : (i + 1) * size] for name, images in batch.items()}
        part_loss, part_grads = nnx.value_and_grad(triplet_loss)(net, part)
        loss += part_loss / parts
        grads = part_grads if grads is None else jax.tree.map(jnp.add, grads, part_grads)
    if parts > 1:
        grads = jax.tree.map(lambda g: g / parts, grads)
    optimizer.update(net, grads)
    return loss


@jax.jit
def jitted(graphdef, state, batch):
    net, optimizer = nnx.merge(graphdef, state)
    loss = train_step(net, optimizer, batch)
    return nnx.state((net, optimizer)), loss


def triplets(step):
    """Noisy images of random classes, as bytes; the negative's class is another than the anchor's."""
    prototypes = np.random.default_rng(7).uniform(0, 1, (CLASSES, SIZE, SIZE, 1))
    random = np.random.default_rng(100 + step)
    classes = random.integers(0, CLASSES, args.batch)
    others = (classes + random.integers(1, CLASSES, args.batch)) % CLASSES

    def photographs(of):
        noisy = prototypes[of] + 0.3 * random.standard_normal((args.batch, SIZE, SIZE, 1))
        return np.clip(255 * noisy, 0, 255).astype(np.uint8)

    return {"anchor": photographs(classes), "positive": photographs(classes), "negative": photographs(others)}


def main():
    net = TripletNet(nnx.Rngs(jax.random.key(0, impl="rbg")))
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(3e-3, b2=0.98, weight_decay=0.02))
    calls = 1
    if args.multisteps:
        calls = args.accumulate
        tx = optax.MultiSteps(tx, every_k_schedule=args.accumulate)
    optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)
    graphdef, state = nnx.split((net, optimizer))
    step_fn = nnx.jit(train_step) if args.mode == "nnx" else train_step

    for step in range(args.steps):
        batch = triplets(step)
        size = args.batch // calls
        losses = []
        for i in range(calls):
            micro = {name: jnp.asarray(images[i * size : (i + 1) * size]) for name, images in batch.items()}
            if args.mode == "jit":
                state, loss = jitted(graphdef, state, micro)
            else:
                loss = step_fn(net, optimizer, micro)
            losses.append(float(loss))
        print(f"step {step} loss {np.mean(losses):.7f}")

    if args.mode == "jit":
        nnx.update((net, optimizer), state)
    size = float(jnp.sqrt(sum(jnp.sum(p**2) for p in jax.tree.leaves(nnx.state(net, nnx.Param)))))
    print(f"norm of parameters {size:.6f}")


if __name__ == "__main__":
    main()
