"""Fits a neural ODE of diffrax to spirals, as in its example, with AdaBelief and a clipped norm.

python train.py [--shard shard_map|jit] [--adjoint checkpoint|backsolve] [--layout per_param|flat|ragged] [--mistake]
"""

import argparse

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

parser = argparse.ArgumentParser()
parser.add_argument("--shard", choices=["shard_map", "jit"], help="Shard over all devices; default: plain JAX.")
parser.add_argument("--adjoint", choices=["checkpoint", "backsolve"], default="checkpoint")
parser.add_argument("--layout", choices=["per_param", "flat", "ragged"], default="per_param")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--mistake", action="store_true", help="Clip by the norm of each device's own shards.")
args = parser.parse_args()

TIMES = np.linspace(0.0, 2.0, 8, dtype=np.float32)
MAX_NORM = 0.1


class Func(eqx.Module):
    scale: jax.Array
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.scale = jnp.ones(())
        self.mlp = eqx.nn.MLP(2, 2, 16, 2, activation=jax.nn.softplus, final_activation=jnp.tanh, key=key)

    def __call__(self, t, y, args):
        return self.scale * self.mlp(y)


class NeuralODE(eqx.Module):
    func: Func

    def __call__(self, ts, y0):
        adjoint = diffrax.RecursiveCheckpointAdjoint() if args.adjoint == "checkpoint" else diffrax.BacksolveAdjoint()
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(self.func),
            diffrax.Tsit5(),
            t0=ts[0],
            t1=ts[-1],
            dt0=ts[1] - ts[0],
            y0=y0,
            saveat=diffrax.SaveAt(ts=ts),
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
            adjoint=adjoint,
            max_steps=64,
        )
        return solution.ys


def spirals(step):
    random = np.random.default_rng(step)
    start = random.uniform(0.5, 1.5, size=(args.batch, 1)).astype(np.float32)
    angle = random.uniform(0, 2 * np.pi, size=(args.batch, 1)).astype(np.float32) + TIMES
    radius = start * np.exp(-0.3 * TIMES)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)


params, static = eqx.partition(NeuralODE(Func(jax.random.key(5678))), eqx.is_inexact_array)
schedule = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 2, 12)


def loss_fn(params, ys):
    model = eqx.combine(params, static)
    predicted = jax.vmap(model, in_axes=(None, 0))(jnp.asarray(TIMES), ys[:, 0])
    return jnp.mean((ys - predicted) ** 2)


def train_plain():
    tx = optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.adabelief(schedule))
    trained, opt_state = params, tx.init(params)

    @jax.jit
    def train_step(params, opt_state, ys):
        loss, grads = jax.value_and_grad(loss_fn)(params, ys)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for step in range(args.steps):
        trained, opt_state, loss = train_step(trained, opt_state, spirals(step))
        print(f"step {step} loss {loss:.9g}")


def train_sharded():
    from crossframe import MeshSpec
    from jax_backend import apply_updates, clip_grad_norm, make_mesh, shard, sharded_optimizer, value_and_grad

    mesh = make_mesh(MeshSpec(shard=jax.device_count()))
    trained = shard(params, mesh, units=[f"func.mlp.layers.{i}" for i in range(3)], layout=args.layout)
    optimizer = sharded_optimizer(optax.adabelief(schedule))
    opt_state = optimizer.init(trained)
    value_and_grads = value_and_grad(loss_fn, mesh, mode=args.shard)
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, trained)

    def clip_own(grads):
        factor = jnp.minimum(1.0, MAX_NORM / optax.global_norm(grads))
        return jax.tree.map(lambda grad: factor * grad, grads)

    @jax.jit
    def train_step(params, opt_state, ys):
        result = value_and_grads(params, ys)
        if args.mistake:
            grads = jax.shard_map(clip_own, mesh=mesh, in_specs=(specs,), out_specs=specs)(result.grads)
        else:
            grads, _ = clip_grad_norm(result.grads, MAX_NORM)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return apply_updates(params, updates), opt_state, result.loss

    for step in range(args.steps):
        trained, opt_state, loss = train_step(trained, opt_state, spirals(step))
        print(f"step {step} loss {loss:.9g}")


if __name__ == "__main__":
    train_sharded() if args.shard else train_plain()
