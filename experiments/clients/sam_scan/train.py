"""Trains an MLP-Mixer of flax with sharpness-aware minimization of optax.contrib, all steps in one lax.scan.

python train.py [--loop] [--sam transparent|hand] [--remat] [--evaluate] [--unrolled] [--mistake]

A step takes the gradient, moves the parameters by a distance of RHO along it, and gives the gradient at that place to AdamW at
the old parameters. optax.contrib.sam does so within an update, or by two updates, the first of which moves the parameters.
--sam hand does so without optax.contrib. With --mistake the gradient is not normalized before the move, whose length is then RHO
times the norm of the gradient.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--batch", type=int, default=12)
parser.add_argument(
    "--sam",
    choices=["opaque", "transparent", "hand"],
    default="opaque",
    help="Both gradients in an update, an update for each, or two gradients and plain AdamW.",
)
parser.add_argument("--loop", action="store_true", help="A jitted step in a loop of Python instead of lax.scan.")
parser.add_argument("--unrolled", action="store_true", help="lax.scan with unroll=3.")
parser.add_argument("--remat", action="store_true", help="Compute blocks again in backward.")
parser.add_argument("--evaluate", action="store_true", help="Evaluate other images in every second step, by lax.cond.")
parser.add_argument("--mistake", action="store_true", help="Move the parameters by RHO times the gradient.")
args = parser.parse_args()

CLASSES, PATCH, PATCHES, WIDTH, RHO = 6, 4, 9, 24, 0.1


class Mlp(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, x):
        y = nn.gelu(nn.Dense(self.hidden)(x))
        return nn.Dense(x.shape[-1])(y)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x).swapaxes(1, 2)
        x = x + Mlp(16, name="over_patches")(y).swapaxes(1, 2)
        return x + Mlp(48, name="over_channels")(nn.LayerNorm()(x))


class Mixer(nn.Module):
    @nn.compact
    def __call__(self, images):
        x = nn.Conv(WIDTH, (PATCH, PATCH), strides=PATCH, name="stem")(images)
        x = x.reshape(len(x), PATCHES, WIDTH)
        block = nn.remat(Block) if args.remat else Block
        for i in range(2):
            x = block(name=f"block{i}")(x)
        return nn.Dense(CLASSES, name="head")(nn.LayerNorm(name="norm")(x).mean(1))


def make_data(number, seed):
    """Images of the shape (number, batch, 12, 12, 1), and labels."""
    templates = np.random.default_rng(7).standard_normal((CLASSES, 12, 12, 1))
    random = np.random.default_rng(seed)
    labels = random.integers(CLASSES, size=(number, args.batch), dtype=np.int32)
    images = 2.0 * templates[labels] + random.standard_normal((*labels.shape, 12, 12, 1))
    return {"images": images.astype(np.float32), "labels": labels}


net = Mixer()
seen = jax.tree.map(lambda x: jnp.asarray(x[0]), make_data(1, 2))


def loss_fn(params, batch):
    logits = net.apply({"params": params}, batch["images"])
    targets = optax.smooth_labels(jax.nn.one_hot(batch["labels"], CLASSES), 0.1)
    return optax.softmax_cross_entropy(logits, targets).mean()


def make_transformation():
    decayed = optax.adamw(optax.cosine_decay_schedule(6e-3, 2 * args.steps), weight_decay=0.02)
    outer = optax.chain(optax.clip_by_global_norm(1.0), decayed)
    if args.sam == "hand":
        return outer
    move = optax.sgd(RHO) if args.mistake else optax.chain(optax.contrib.normalize(), optax.sgd(RHO))
    return optax.contrib.sam(outer, move, sync_period=2, opaque_mode=args.sam == "opaque")


def moved(params, grads):
    """Parameters at the end of the move along the gradient."""
    length = RHO if args.mistake else RHO / optax.global_norm(grads)
    return jax.tree.map(lambda p, g: p + length * g, params, grads)


def train_step(state, batch):
    """Steps of --sam transparent have two updates with the same images."""
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    if args.sam == "opaque":
        grad_fn = jax.grad(lambda params, _: loss_fn(params, batch))
        updates, opt_state = state.tx.update(grads, state.opt_state, state.params, grad_fn=grad_fn)
        params = optax.apply_updates(state.params, updates)
        state = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
    elif args.sam == "transparent":
        state = state.apply_gradients(grads=grads)
        state = state.apply_gradients(grads=jax.grad(loss_fn)(state.params, batch))
    else:
        state = state.apply_gradients(grads=jax.grad(loss_fn)(moved(state.params, grads), batch))
    if not args.evaluate:
        return state, (loss, jnp.nan)
    count = state.step // (2 if args.sam == "transparent" else 1)
    of_seen = jax.lax.cond(count % 2 == 0, lambda: loss_fn(state.params, seen), lambda: jnp.float32(jnp.nan))
    return state, (loss, of_seen)


@jax.jit
def train(state, data):
    return jax.lax.scan(train_step, state, data, unroll=3 if args.unrolled else 1)


def main():
    data = jax.tree.map(jnp.asarray, make_data(args.steps, 1))
    params = net.init(jax.random.key(0), data["images"][0])["params"]
    state = TrainState.create(apply_fn=net.apply, params=params, tx=make_transformation())
    if args.loop:
        step_fn = jax.jit(train_step, donate_argnums=0)
        found = []
        for step in range(args.steps):
            state, both = step_fn(state, jax.tree.map(lambda x, step=step: x[step], data))
            found.append(both)
        losses, evaluations = map(jnp.stack, zip(*found, strict=True))
    else:
        state, (losses, evaluations) = train(state, data)
    for step, (loss, of_seen) in enumerate(zip(losses, evaluations, strict=True)):
        print(f"step {step} loss {loss:.9g}" + (f" evaluation {of_seen:.9g}" if np.isfinite(of_seen) else ""))
    print(f"loss of other images {loss_fn(state.params, seen):.9g}")
    print(f"norm of the parameters {optax.global_norm(state.params):.9g}")
    return state.params


if __name__ == "__main__":
    main()
