"""Trains two input convex nets of ott-jax as dual potentials of optimal transport, each with its own optimizer of optax.

python train.py [--shard shard_map|jit] [--loss dual|sinkhorn] [--mistake]
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ott.neural.networks.icnn import ICNN
from ott.neural.networks.potentials import PotentialMLP
from ott.tools import sinkhorn_divergence

parser = argparse.ArgumentParser()
parser.add_argument("--shard", choices=["shard_map", "jit"], help="Shard over all devices; default: plain JAX.")
parser.add_argument("--loss", choices=["dual", "sinkhorn"], default="dual")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--mistake", action="store_true", help="Forget stop_gradient: f also descends the loss of g.")
args = parser.parse_args()

DIM = 2

f = ICNN(dim_data=DIM, dim_hidden=[12, 12], pos_weights=True)
g = PotentialMLP(dim_hidden=[12, 12], is_potential=True)


def points(step):
    random = np.random.default_rng(step)
    corners = random.choice([-1.0, 1.0], size=(args.batch, DIM))
    target = corners + 0.2 * random.standard_normal((args.batch, DIM))
    source = random.standard_normal((args.batch, DIM))
    return {"source": source.astype(np.float32), "target": target.astype(np.float32)}


keys = jax.random.split(jax.random.key(0))
params = {"f": f.init(keys[0], jnp.ones(DIM))["params"], "g": g.init(keys[1], jnp.ones(DIM))["params"]}


def loss_fn(params, batch):
    fixed = params if args.mistake else jax.lax.stop_gradient(params)
    value = jax.vmap(lambda params, x: f.apply({"params": params}, x), in_axes=(None, 0))
    transport = jax.vmap(jax.grad(lambda x, params: x @ x / 2 + g.apply({"params": params}, x)), in_axes=(0, None))
    moved = transport(batch["target"], params["g"])
    if args.loss == "sinkhorn":
        # The distance of two clouds of points, not a mean over points.
        solver = {"max_iterations": 10, "min_iterations": 10, "implicit_diff": None}
        divergence, _ = sinkhorn_divergence.sinkdiv(moved, batch["source"], epsilon=0.5, solve_kwargs=solver)
        return divergence
    loss_g = jnp.mean(value(fixed["f"], moved) - jnp.sum(batch["target"] * moved, axis=-1))
    moved = jax.lax.stop_gradient(moved)
    loss_f = jnp.mean(value(params["f"], batch["source"]) - value(params["f"], moved))
    return loss_f + loss_g


def optimizers(labels):
    return optax.partition({"f": optax.adam(3e-3, b1=0.5), "g": optax.adamw(1e-2, weight_decay=1e-2)}, labels)


def train_plain():
    tx = optimizers({"f": "f", "g": "g"})
    trained, opt_state = params, tx.init(params)

    @jax.jit
    def train_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for step in range(args.steps):
        trained, opt_state, loss = train_step(trained, opt_state, points(step))
        print(f"step {step} loss {loss:.9g}")


def train_sharded():
    from crossframe import MeshSpec
    from jax_backend import apply_updates, make_mesh, shard, sharded_optimizer, value_and_grad

    mesh = make_mesh(MeshSpec(shard=jax.device_count()))
    trained = shard(params, mesh, units=("f", "g"))
    # The optimizer sees a dict by path, "f.w_zs_0.kernel".
    optimizer = sharded_optimizer(optimizers(lambda by_path: {path: path.split(".")[0] for path in by_path}))
    opt_state = optimizer.init(trained)
    value_and_grads = value_and_grad(loss_fn, mesh, mode=args.shard)

    @jax.jit
    def train_step(params, opt_state, batch):
        result = value_and_grads(params, batch)
        updates, opt_state = optimizer.update(result.grads, opt_state, params)
        return apply_updates(params, updates), opt_state, result.loss

    for step in range(args.steps):
        trained, opt_state, loss = train_step(trained, opt_state, points(step))
        print(f"step {step} loss {loss:.9g}")


if __name__ == "__main__":
    train_sharded() if args.shard else train_plain()
