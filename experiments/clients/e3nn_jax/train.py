"""Trains an equivariant message-passing net of e3nn-jax on energies and forces of random molecules, with optax's Adam.

python train.py [--shard shard_map|jit] [--mistake]
"""

import argparse

import e3nn_jax as e3nn
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

parser = argparse.ArgumentParser()
parser.add_argument("--shard", choices=["shard_map", "jit"], help="Shard over all devices; default: plain JAX.")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--mistake", action="store_true", help="Add the gradients of devices up, without a division.")
args = parser.parse_args()

ATOMS, KINDS, CUTOFF = 5, 3, 3.0
HIDDEN = e3nn.Irreps("4x0e + 3x1o")


class Net(nn.Module):
    """The energy of one molecule; atoms of kind 0 are padding."""

    @nn.compact
    def __call__(self, positions, kinds):
        senders, receivers = np.nonzero(~np.eye(ATOMS, dtype=bool))
        vectors = positions[receivers] - positions[senders]
        real = (kinds[senders] > 0) & (kinds[receivers] > 0)
        lengths = jnp.linalg.norm(vectors, axis=-1)
        radial = e3nn.bessel(lengths, 5, CUTOFF) * e3nn.poly_envelope(5, 2, CUTOFF)(lengths)[:, None]
        radial = jnp.where(real[:, None], radial, 0.0)
        harmonics = e3nn.spherical_harmonics([0, 1], e3nn.IrrepsArray("1o", vectors), normalize=True)
        x = e3nn.IrrepsArray("4x0e", nn.Embed(KINDS, 4)(kinds))
        for layer in range(2):
            messages = e3nn.concatenate([x[senders], e3nn.tensor_product(x[senders], harmonics)])
            messages = messages.filter(HIDDEN).regroup()
            weights = e3nn.flax.MultiLayerPerceptron([8, messages.irreps.num_irreps], jax.nn.silu, name=f"mlp{layer}")
            messages = messages * weights(radial)
            gathered = e3nn.scatter_sum(messages, dst=receivers, output_size=ATOMS) / 2.0
            skip = e3nn.flax.Linear(HIDDEN, force_irreps_out=True, name=f"skip{layer}")(x)
            gates = HIDDEN.filter(drop="0e").num_irreps
            irreps = HIDDEN + e3nn.Irreps(f"{gates}x0e")
            x = e3nn.flax.Linear(irreps, name=f"linear{layer}")(gathered)
            x = e3nn.gate(x.sort().regroup()) + skip
        energies = e3nn.flax.Linear("0e", name="head")(x).array[:, 0]
        scale = self.param("scale", nn.initializers.ones, ())
        return scale * jnp.sum(jnp.where(kinds > 0, energies, 0.0))


def molecules(step):
    random = np.random.default_rng(step)
    positions = np.stack(np.meshgrid([0, 1], [0, 1], [0, 1]), axis=-1).reshape(-1, 3)[:ATOMS] * 1.2
    positions = positions + 0.2 * random.standard_normal((args.batch, ATOMS, 3))
    kinds = random.integers(1, KINDS, size=(args.batch, ATOMS))
    kinds[:, -1] *= random.integers(2, size=args.batch)
    return {
        "positions": positions.astype(np.float32),
        "kinds": kinds.astype(np.int32),
        "energy": random.standard_normal(args.batch).astype(np.float32),
        "forces": random.standard_normal((args.batch, ATOMS, 3)).astype(np.float32),
    }


net = Net()
first = molecules(0)
params = jax.jit(net.init)(jax.random.key(0), first["positions"][0], first["kinds"][0])["params"]
tx = optax.chain(optax.adaptive_grad_clip(0.5), optax.amsgrad(optax.exponential_decay(1e-2, 2, 0.9)))


def loss_fn(params, batch):
    energy_and_gradient = jax.value_and_grad(lambda positions, kinds: net.apply({"params": params}, positions, kinds))
    energy, gradient = jax.vmap(energy_and_gradient)(batch["positions"], batch["kinds"])
    of_forces = jnp.sum(jnp.where(batch["kinds"][..., None] > 0, gradient + batch["forces"], 0.0) ** 2, axis=(1, 2))
    return jnp.mean((energy - batch["energy"]) ** 2 + 0.1 * of_forces)


def train_plain():
    trained, opt_state = params, tx.init(params)

    @jax.jit
    def train_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for step in range(args.steps):
        trained, opt_state, loss = train_step(trained, opt_state, molecules(step))
        print(f"step {step} loss {loss:.9g}")


def train_sharded():
    from crossframe import MeshSpec
    from jax_backend import apply_updates, make_mesh, shard, sharded_optimizer, value_and_grad

    mesh = make_mesh(MeshSpec(shard=jax.device_count()))
    trained = shard(params, mesh, units=("mlp0", "mlp1", "linear0", "linear1"))
    optimizer = sharded_optimizer(tx)
    opt_state = optimizer.init(trained)
    divisor = 1.0 if args.mistake else None
    value_and_grads = value_and_grad(loss_fn, mesh, mode=args.shard, gradient_divide_factor=divisor)

    @jax.jit
    def train_step(params, opt_state, batch):
        result = value_and_grads(params, batch)
        updates, opt_state = optimizer.update(result.grads, opt_state, params)
        return apply_updates(params, updates), opt_state, result.loss

    for step in range(args.steps):
        trained, opt_state, loss = train_step(trained, opt_state, molecules(step))
        print(f"step {step} loss {loss:.9g}")


if __name__ == "__main__":
    train_sharded() if args.shard else train_plain()
