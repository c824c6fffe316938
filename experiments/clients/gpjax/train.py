"""Fits a sparse variational Gaussian process of GPJax to labels, in float64 as GPJax advises, with optax's NAdamW.

python train.py [--shard shard_map|jit] [--freeze] [--mistake]
"""

import argparse

import equinox as eqx
import gpjax as gpx
import jax
import jax.numpy as jnp
import numpy as np
import optax

jax.config.update("jax_enable_x64", True)

parser = argparse.ArgumentParser()
parser.add_argument("--shard", choices=["shard_map", "jit"], help="Shard over all devices; default: plain JAX.")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--freeze", action="store_true", help="Keep the inducing inputs.")
parser.add_argument("--mistake", action="store_true", help="State the rows of one device as the size of the data.")
args = parser.parse_args()

ROWS, INDUCING = 64, 8


def rows():
    random = np.random.default_rng(1)
    x = random.uniform(-2.0, 2.0, size=(ROWS, 2))
    y = np.sin(2 * x[:, :1]) + x[:, 1:] + 0.3 * random.standard_normal((ROWS, 1)) > 0
    return x, y.astype(np.float64)


def batches():
    x, y = rows()
    for step in range(args.steps):
        taken = np.arange(step * args.batch, (step + 1) * args.batch) % ROWS
        yield {"x": x[taken], "y": y[taken]}


prior = gpx.gps.Prior(
    mean_function=gpx.mean_functions.Constant(),
    kernel=gpx.kernels.Matern52(lengthscale=jnp.array([1.0, 0.7])) + gpx.kernels.RBF(),
)
inducing = np.random.default_rng(2).uniform(-2.0, 2.0, size=(INDUCING, 2))
family = gpx.variational_families.WhitenedVariationalGaussian(
    model=prior * gpx.likelihoods.Bernoulli(), inducing_inputs=jnp.asarray(inducing)
)
params, static = eqx.partition(family, eqx.is_inexact_array)


def is_kept(path):
    return args.freeze and "inducing_inputs" in jax.tree_util.keystr(path)


def loss_fn(params, batch):
    total = ROWS // jax.device_count() if args.mistake else ROWS
    data = gpx.Dataset(X=batch["x"], y=batch["y"], n_total=total)
    return -gpx.objectives.elbo(eqx.combine(params, static), data)


def train_plain():
    labels = jax.tree_util.tree_map_with_path(lambda path, _: "kept" if is_kept(path) else "trained", params)
    tx = optax.partition({"trained": optax.nadamw(1e-2), "kept": optax.set_to_zero()}, lambda _: labels)
    if not args.freeze:
        tx = optax.nadamw(1e-2)
    trained, opt_state = params, tx.init(params)

    @jax.jit
    def train_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for step, batch in enumerate(batches()):
        trained, opt_state, loss = train_step(trained, opt_state, batch)
        print(f"step {step} loss {loss:.17g}")


def train_sharded():
    from crossframe import MeshSpec
    from jax_backend import apply_updates, make_mesh, shard, sharded_optimizer, value_and_grad

    mesh = make_mesh(MeshSpec(shard=jax.device_count()))
    trained = shard(params, mesh, frozen=("inducing_inputs",) if args.freeze else ())
    optimizer = sharded_optimizer(optax.nadamw(1e-2))
    opt_state = optimizer.init(trained)
    value_and_grads = value_and_grad(loss_fn, mesh, mode=args.shard)

    @jax.jit
    def train_step(params, opt_state, batch):
        result = value_and_grads(params, batch)
        updates, opt_state = optimizer.update(result.grads, opt_state, params)
        return apply_updates(params, updates), opt_state, result.loss

    for step, batch in enumerate(batches()):
        trained, opt_state, loss = train_step(trained, opt_state, batch)
        print(f"step {step} loss {loss:.17g}")


if __name__ == "__main__":
    train_sharded() if args.shard else train_plain()
