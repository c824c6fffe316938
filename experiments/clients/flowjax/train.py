"""Fits a conditional spline flow of flowjax to points by maximum likelihood, with optax's Lion.

python train.py [--shard shard_map|jit] [--flow masked|coupling] [--layout per_param|flat|ragged] [--mistake]
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import paramax
from flowjax.bijections import RationalQuadraticSpline
from flowjax.distributions import Normal
from flowjax.flows import coupling_flow, masked_autoregressive_flow
from flowjax.train.losses import MaximumLikelihoodLoss

parser = argparse.ArgumentParser()
parser.add_argument("--shard", choices=["shard_map", "jit"], help="Shard over all devices; default: plain JAX.")
parser.add_argument("--flow", choices=["masked", "coupling"], default="masked")
parser.add_argument("--layout", choices=["per_param", "flat", "ragged"], default="per_param")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--mistake", action="store_true", help="Multiply the learning rate by the number of devices.")
args = parser.parse_args()

DIM, CONDITIONS = 3, 2


def points(step):
    random = np.random.default_rng(step)
    condition = random.standard_normal((args.batch, CONDITIONS))
    x = random.standard_normal((args.batch, DIM)) * 0.5 + np.tanh(condition @ np.ones((CONDITIONS, DIM)))
    return {"x": x.astype(np.float32), "condition": condition.astype(np.float32)}


def make_flow(key):
    make = masked_autoregressive_flow if args.flow == "masked" else coupling_flow
    return make(
        key,
        base_dist=Normal(jnp.zeros(DIM)),
        transformer=RationalQuadraticSpline(knots=6, interval=4),
        cond_dim=CONDITIONS,
        flow_layers=3,
        nn_width=16,
    )


# As fit_to_data of flowjax: the arrays that are not wrapped in NonTrainable are trained.
flow = make_flow(jax.random.key(0))
params, static = eqx.partition(flow, eqx.is_inexact_array, is_leaf=lambda leaf: isinstance(leaf, paramax.NonTrainable))
learning_rate = 3e-3 * jax.device_count() if args.mistake else 3e-3
tx = optax.lion(learning_rate, weight_decay=1e-3)


def loss_fn(params, batch):
    return MaximumLikelihoodLoss()(params, static, batch["x"], batch["condition"])


def train_plain():
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
    trained = shard(params, mesh, layout=args.layout)
    optimizer = sharded_optimizer(tx)
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
