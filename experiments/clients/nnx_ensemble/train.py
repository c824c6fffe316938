"""Trains a deep ensemble of flax.nnx for regression with uncertainty: members are one module with a leading axis, by nnx.vmap.

python train.py [--style vmap | stacked | functional] [--logpdf] [--accumulate 2] [--eager] [--mistake]

Each member predicts a mean and a variance, and has bootstrap weights of its own. Members are divided over all devices. Gradients
are clipped for each member. With --mistake the stacked style clips by the norm over all members, which couples them.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--accumulate", type=int, default=1, help="Parts of a batch, by optax.MultiSteps.")
parser.add_argument(
    "--style",
    choices=["vmap", "stacked", "functional"],
    default="vmap",
    help="Optimizers in nnx.vmap, or one for all members outside of it, or nnx.split with jax.vmap.",
)
parser.add_argument("--logpdf", action="store_true", help="The density of jax.scipy instead of a formula.")
parser.add_argument("--eager", action="store_true", help="No jit.")
parser.add_argument("--mistake", action="store_true", help="Stacked style: clip by the norm over all members.")
args = parser.parse_args()

MEMBERS, FEATURES, WIDTH, CLIP = 4, 6, 24, 0.5


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(FEATURES, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 2, rngs=rngs)

    def __call__(self, x):
        x = nnx.gelu(self.norm(self.first(x)))
        mean, raw = jnp.split(self.head(nnx.gelu(self.second(x))), 2, axis=-1)
        return mean[:, 0], nnx.softplus(raw[:, 0]) + 1e-3


def batches() -> list[tuple[np.ndarray, ...]]:
    """(inputs, targets, weights of each member) of the steps."""
    random = np.random.default_rng(0)
    slope = random.standard_normal(FEATURES)
    found = []
    for _ in range(args.steps):
        x = random.standard_normal((args.batch, FEATURES))
        # Noise grows with the first feature, so that members have gradients of different norms.
        y = np.sin(x @ slope) + 0.3 * np.exp(x[:, 0]) * random.standard_normal(args.batch)
        weights = random.poisson(1.0, (MEMBERS, args.batch))
        found.append((x.astype(np.float32), y.astype(np.float32), weights.astype(np.float32)))
    return found


def loss_fn(model, x, y, weights):
    mean, variance = model(x)
    if args.logpdf:
        losses = -jax.scipy.stats.norm.logpdf(y, mean, jnp.sqrt(variance))
    else:
        losses = 0.5 * (jnp.log(2 * jnp.pi * variance) + (y - mean) ** 2 / variance)
    return (weights * losses).mean()


def clip_by_member_norm(most: float) -> optax.GradientTransformation:
    """As optax.clip_by_global_norm, for each index of the leading axis."""

    def update(updates, state, params=None):
        squares = [(leaf**2).sum(range(1, leaf.ndim)) for leaf in jax.tree.leaves(updates)]
        norms = jnp.sqrt(sum(squares))

        def clipped(leaf):
            norm = norms.reshape(-1, *[1] * (leaf.ndim - 1))
            return jnp.where(norm < most, leaf, leaf / norm * most)

        return jax.tree.map(clipped, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def make_transformation(clip: optax.GradientTransformation) -> optax.GradientTransformation:
    tx = optax.chain(clip, optax.adamw(optax.exponential_decay(1e-2, 1, 0.9), weight_decay=1e-3))
    return optax.MultiSteps(tx, args.accumulate) if args.accumulate > 1 else tx


def objects_step():
    """(model, optimizer, step) with nnx.Optimizer, which is in nnx.vmap, or has all members."""
    of_member = make_transformation(optax.clip_by_global_norm(CLIP))

    @nnx.split_rngs(splits=MEMBERS)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        model = Net(rngs)
        return model, nnx.Optimizer(model, of_member, wrt=nnx.Param)

    model, optimizer = make(nnx.Rngs(0))

    @nnx.vmap(in_axes=(0, 0, None, None, 0), out_axes=0)
    def update_member(model, optimizer, x, y, weights):
        loss, grads = nnx.value_and_grad(loss_fn)(model, x, y, weights)
        optimizer.update(model, grads)
        return loss

    if args.style == "vmap":
        return model, optimizer, update_member
    clip = optax.clip_by_global_norm(CLIP) if args.mistake else clip_by_member_norm(CLIP)
    optimizer = nnx.Optimizer(model, make_transformation(clip), wrt=nnx.Param)

    def update_all(model, optimizer, x, y, weights):
        gradients = nnx.vmap(nnx.value_and_grad(loss_fn), in_axes=(0, None, None, 0), out_axes=0)
        losses, grads = gradients(model, x, y, weights)
        optimizer.update(model, grads)
        return losses

    return model, optimizer, update_all


def functional(model, sharding):
    """(state of parameters and optimizers, step) with jax.vmap over both."""
    tx = make_transformation(optax.clip_by_global_norm(CLIP))
    graphdef, params = nnx.split(model)

    def of_member(params, opt_state, x, y, weights):
        loss, grads = jax.value_and_grad(lambda params: loss_fn(nnx.merge(graphdef, params), x, y, weights))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    step = jax.vmap(of_member, in_axes=(0, 0, None, None, 0))
    return params, jax.device_put(jax.vmap(tx.init)(params), sharding), step if args.eager else jax.jit(step)


def main():
    mesh = Mesh(np.array(jax.devices()), ("member",))
    replicated, sharded = NamedSharding(mesh, P()), NamedSharding(mesh, P("member"))
    model, optimizer, step_fn = objects_step()

    def place(leaf):
        return jax.device_put(leaf, sharded if leaf.ndim else replicated)

    nnx.update(model, jax.tree.map(place, nnx.state(model)))
    nnx.update(optimizer, jax.tree.map(place, nnx.state(optimizer)))
    if args.style == "functional":
        params, opt_state, step_fn = functional(model, sharded)
    elif not args.eager:
        step_fn = nnx.jit(step_fn)
    for step, (x, y, weights) in enumerate(batches()):
        losses = []
        for i in range(args.accumulate):
            part = slice(i * args.batch // args.accumulate, (i + 1) * args.batch // args.accumulate)
            batch = *jax.device_put((x[part], y[part]), replicated), jax.device_put(weights[:, part], sharded)
            if args.style == "functional":
                params, opt_state, loss = step_fn(params, opt_state, *batch)
            else:
                loss = step_fn(model, optimizer, *batch)
            losses.append(np.asarray(loss))
        print(f"step {step} losses", *(f"{loss:.9g}" for loss in np.mean(losses, 0)))
    return nnx.to_pure_dict(params if args.style == "functional" else nnx.state(model))


if __name__ == "__main__":
    main()
