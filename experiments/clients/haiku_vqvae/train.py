"""Trains a VQ-VAE of haiku on random images with optax, as haiku's example; codes are moving averages over all devices.

python train.py [--shard shard_map|jit] [--mistake]
"""

import argparse

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

parser = argparse.ArgumentParser()
parser.add_argument("--shard", choices=["shard_map", "jit"], help="Shard over all devices; default: plain JAX.")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--mistake", action="store_true", help="Average codes over the samples of each device.")
args = parser.parse_args()

# haiku's quantizer and its batch norm average over the named axis, which is that of the mesh.
AXIS = "shard" if args.shard else None


def forward(images, is_training):
    x = hk.Conv2D(8, kernel_shape=4, stride=2, name="down1")(images)
    x = hk.BatchNorm(True, True, decay_rate=0.9, cross_replica_axis=AXIS)(x, is_training)
    x = hk.Conv2D(16, kernel_shape=4, stride=2, name="down2")(jax.nn.relu(x))
    x = x + hk.SeparableDepthwiseConv2D(1, 3, name="depthwise")(jax.nn.relu(x))
    x = hk.Conv2D(6, kernel_shape=1, name="to_codes")(jax.nn.relu(x))
    quantizer = hk.nets.VectorQuantizerEMA(
        embedding_dim=6,
        num_embeddings=12,
        commitment_cost=0.25,
        decay=0.9,
        cross_replica_axis=None if args.mistake else AXIS,
    )
    codes = quantizer(x, is_training)
    x = hk.Conv2DTranspose(8, kernel_shape=4, stride=2, name="up1")(codes["quantize"])
    x = hk.Conv2DTranspose(1, kernel_shape=4, stride=2, name="up2")(jax.nn.relu(x))
    return x, codes["loss"]


net = hk.without_apply_rng(hk.transform_with_state(forward))


def images(step):
    random = np.random.default_rng(step)
    coarse = random.standard_normal((args.batch, 4, 4, 1)).astype(np.float32)
    return np.kron(coarse, np.ones((1, 4, 4, 1), np.float32))


def loss_of(params, state, batch):
    (reconstruction, commitment), state = net.apply(params, state, batch, True)
    return jnp.mean((reconstruction - batch) ** 2) + commitment, state


def init():
    # The mesh's axis has no name outside of the step.
    global AXIS
    axis, AXIS, mistake, args.mistake = AXIS, None, args.mistake, False
    params, state = net.init(jax.random.key(42), images(0)[:1], True)
    AXIS, args.mistake = axis, mistake
    return params, state


tx = optax.chain(optax.clip(0.5), optax.adam(3e-3))


def train_plain():
    params, state = init()
    opt_state = tx.init(params)

    @jax.jit
    def train_step(params, state, opt_state, batch):
        (loss, state), grads = jax.value_and_grad(loss_of, has_aux=True)(params, state, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), state, opt_state, loss

    for step in range(args.steps):
        params, state, opt_state, loss = train_step(params, state, opt_state, images(step))
        print(f"step {step} loss {loss:.9g}")


def train_sharded():
    from crossframe import MeshSpec
    from jax_backend import LossOutput, apply_updates, make_mesh, per_rank, shard, sharded_optimizer, value_and_grad

    mesh = make_mesh(MeshSpec(shard=jax.device_count()))
    params, state = init()
    params, state = shard(params, mesh), per_rank(state, mesh)
    optimizer = sharded_optimizer(tx)
    opt_state = optimizer.init(params)

    def loss_fn(params, batch, state):
        loss, state = loss_of(params, state, batch)
        return LossOutput(loss, state=state)

    value_and_grads = value_and_grad(loss_fn, mesh, mode=args.shard)

    @jax.jit
    def train_step(params, state, opt_state, batch):
        result = value_and_grads(params, batch, state=state)
        updates, opt_state = optimizer.update(result.grads, opt_state, params)
        return apply_updates(params, updates), result.state, opt_state, result.loss

    for step in range(args.steps):
        params, state, opt_state, loss = train_step(params, state, opt_state, images(step))
        print(f"step {step} loss {loss:.9g}")


if __name__ == "__main__":
    train_sharded() if args.shard else train_plain()
