"""Trains an emulator of pdequinox for an advection step with Adafactor: a Fourier neural operator, a dilated net or a U-Net.

python train.py [--shard shard_map|jit] [--net fno|dilated|unet] [--microbatches 2] [--mistake]
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from pdequinox.arch import ClassicFNO, ClassicUNet, DilatedResNet

parser = argparse.ArgumentParser()
parser.add_argument("--shard", choices=["shard_map", "jit"], help="Shard over all devices; default: plain JAX.")
parser.add_argument("--net", choices=["fno", "dilated", "unet"], default="fno")
parser.add_argument("--microbatches", type=int, default=1)
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--mistake", action="store_true", help="Each device gets the targets of its neighbour.")
args = parser.parse_args()

POINTS = 16


def make_net(key):
    if args.net == "fno":  # fields in the plane
        return ClassicFNO(2, 1, 1, hidden_channels=6, num_modes=4, num_blocks=2, boundary_mode="periodic", key=key)
    if args.net == "dilated":
        return DilatedResNet(1, 1, 1, hidden_channels=8, num_blocks=1, dilation_rates=(1, 2, 4, 1), key=key)
    return ClassicUNet(1, 1, 1, hidden_channels=6, num_levels=2, key=key)  # strided and transposed convolutions


def fields(step):
    random = np.random.default_rng(step)
    dims = (POINTS, POINTS) if args.net == "fno" else (POINTS,)
    spectrum = np.fft.rfftn(random.standard_normal((args.batch, 1, *dims)), axes=range(2, 2 + len(dims)))
    now = np.fft.irfftn(spectrum * np.exp(-np.arange(spectrum.shape[-1])), s=dims, axes=range(2, 2 + len(dims)))
    later = np.roll(now, 2, axis=-1) - 0.1 * now**2
    return {"now": now.astype(np.float32), "later": later.astype(np.float32)}


params, static = eqx.partition(make_net(jax.random.key(0)), eqx.is_inexact_array)
tx = optax.adafactor(1e-2, min_dim_size_to_factor=4, clipping_threshold=1.0)


def loss_fn(params, batch):
    predicted = jax.vmap(eqx.combine(params, static))(batch["now"])
    return jnp.mean((predicted - batch["later"]) ** 2) / args.microbatches


def part(batch, i):
    return jax.tree.map(lambda leaf: leaf[i :: args.microbatches], batch)


def train_plain():
    trained, opt_state = params, tx.init(params)

    @jax.jit
    def train_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for step in range(args.steps):
        trained, opt_state, loss = train_step(trained, opt_state, fields(step))
        print(f"step {step} loss {loss:.9g}")


def train_sharded():
    from crossframe import MeshSpec
    from jax_backend import apply_updates, make_mesh, shard, sharded_optimizer, value_and_grad

    mesh = make_mesh(MeshSpec(shard=jax.device_count()))
    trained = shard(params, mesh, units=("blocks.0", "blocks.1") if args.net == "fno" else ())
    optimizer = sharded_optimizer(tx)
    opt_state = optimizer.init(trained)
    local = value_and_grad(loss_fn, mesh, mode=args.shard, reduces=False)
    last = value_and_grad(loss_fn, mesh, mode=args.shard)

    @jax.jit
    def train_step(params, opt_state, batch):
        loss, grads = 0.0, None
        for i in range(args.microbatches - 1):
            result = local(params, part(batch, i), accumulated=grads)
            loss, grads = loss + result.loss, result.grads
        result = last(params, part(batch, args.microbatches - 1), accumulated=grads)
        updates, opt_state = optimizer.update(result.grads, opt_state, params)
        return apply_updates(params, updates), opt_state, loss + result.loss

    for step in range(args.steps):
        batch = fields(step)
        if args.mistake:
            batch["later"] = np.roll(batch["later"], args.batch // jax.device_count(), axis=0)
        trained, opt_state, loss = train_step(trained, opt_state, batch)
        print(f"step {step} loss {loss:.9g}")


if __name__ == "__main__":
    train_sharded() if args.shard else train_plain()
