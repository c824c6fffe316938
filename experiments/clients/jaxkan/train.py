"""Solves a Poisson equation with a Kolmogorov-Arnold network of jaxKAN (flax's nnx) and optax's Adan.

python train.py [--shard shard_map|jit] [--layer spline|base|chebyshev|fourier] [--layout per_param|flat|ragged] [--mistake]
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxkan.models.KAN import KAN

parser = argparse.ArgumentParser()
parser.add_argument("--shard", choices=["shard_map", "jit"], help="Shard over all devices; default: plain JAX.")
parser.add_argument("--layer", choices=["spline", "base", "chebyshev", "fourier"], default="spline")
parser.add_argument("--layout", choices=["per_param", "flat", "ragged"], default="per_param")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--mistake", action="store_true", help="Add up the residuals of a device, without its share.")
args = parser.parse_args()

OPTIONS = {"spline": {"k": 3, "G": 4}, "base": {"k": 3, "G": 4}, "chebyshev": {"D": 4}, "fourier": {"D": 4}}


def make_model():
    return KAN([2, 5, 1], args.layer, OPTIONS[args.layer], seed=0)


def collocation(step):
    random = np.random.default_rng(step)
    inner = random.uniform(-1.0, 1.0, size=(args.batch, 2))
    edge = random.uniform(-1.0, 1.0, size=(args.batch, 2))
    edge[:, 0] = np.sign(edge[:, 0])
    return {"inner": inner.astype(np.float32), "edge": edge.astype(np.float32)}


def sum_of_residuals(model, batch):
    """The squared residuals of the equation and of the boundary, added up over points."""

    def value(point):
        return model(point[None])[0, 0]

    laplacian = jax.vmap(lambda point: jnp.trace(jax.hessian(value)(point)))(batch["inner"])
    source = jnp.sin(np.pi * batch["inner"][:, 0]) * jnp.cos(batch["inner"][:, 1])
    at_edge = model(batch["edge"])[:, 0]
    return 0.01 * jnp.sum((laplacian - source) ** 2) + jnp.sum(at_edge**2)


tx = optax.adan(5e-3)


def train_plain():
    model = make_model()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(sum_of_residuals)(model, batch)
        optimizer.update(model, grads)
        return loss

    for step in range(args.steps):
        loss = train_step(model, optimizer, collocation(step))
        print(f"step {step} loss {loss:.9g}")


def train_sharded():
    from crossframe import MeshSpec
    from jax_backend import apply_updates, make_mesh, sharded_optimizer, value_and_grad
    from jax_backend.nnx import ShardedModule

    mesh = make_mesh(MeshSpec(shard=jax.device_count()))
    module = ShardedModule(make_model(), mesh, units=("layers.0", "layers.1"), layout=args.layout)
    # Adan treats elements one by one, which shards of other layouts than per_param require.
    optimizer = sharded_optimizer(tx, elementwise=True)
    opt_state = optimizer.init(module.sharded)
    # The mean over devices of this is the sum over all points.
    factor = 1 if args.mistake else jax.device_count()
    loss_fn = module.loss(lambda model, batch: factor * sum_of_residuals(model, batch))
    value_and_grads = value_and_grad(loss_fn, mesh, mode=args.shard)

    @jax.jit
    def train_step(params, state, opt_state, batch):
        result = value_and_grads(params, batch, state=state)
        updates, opt_state = optimizer.update(result.grads, opt_state, params)
        return apply_updates(params, updates), result.state, opt_state, result.loss

    for step in range(args.steps):
        module.sharded, module.state, opt_state, loss = train_step(
            module.sharded, module.state, opt_state, collocation(step)
        )
        print(f"step {step} loss {loss:.9g}")


if __name__ == "__main__":
    train_sharded() if args.shard else train_plain()
