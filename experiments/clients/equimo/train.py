"""Trains the linear-attention model MLLA of equimo on random images with optax: dropout, drop path and averaged weights.

python train.py [--shard shard_map|jit] [--precision bfloat16] [--rng] [--mistake]
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from equimo.models import Mlla

parser = argparse.ArgumentParser()
parser.add_argument("--shard", choices=["shard_map", "jit"], help="Shard over all devices; default: plain JAX.")
parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32", help="Of gathered parameters.")
parser.add_argument("--rng", action="store_true", help="A key for each device instead of each image.")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--mistake", action="store_true", help="With --rng: the same key on all devices.")
args = parser.parse_args()

CLASSES, SIZE = 5, 16

model = Mlla(
    SIZE,
    3,
    key=jax.random.key(0),
    dim=8,
    patch_size=4,
    depths=[1, 1],
    num_heads=[2, 4],
    drop_rate=0.1,
    drop_path_rate=0.2,
    num_classes=CLASSES,
)
params, static = eqx.partition(model, eqx.is_inexact_array)
tx = optax.chain(
    optax.add_decayed_weights(1e-2), optax.sgd(optax.cosine_onecycle_schedule(8, 0.1), momentum=0.9, nesterov=True)
)
DECAY = 0.9  # of the averaged weights


def images(step):
    random = np.random.default_rng(step)
    return {
        "image": random.standard_normal((args.batch, 3, SIZE, SIZE)).astype(np.float32),
        "label": random.integers(CLASSES, size=args.batch).astype(np.int32),
    }


def mean_loss(params, batch, keys):
    apply = jax.vmap(lambda image, key: eqx.combine(params, static)(image, key=key, inference=False))
    logits = apply(batch["image"], keys)
    labels = optax.smooth_labels(jax.nn.one_hot(batch["label"], CLASSES), 0.1)
    return optax.softmax_cross_entropy(logits.astype(jnp.float32), labels).mean()


def train_plain():
    trained, averaged, opt_state = params, params, tx.init(params)

    @jax.jit
    def train_step(params, averaged, opt_state, batch, keys):
        loss, grads = jax.value_and_grad(mean_loss)(params, batch, keys)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, optax.incremental_update(params, averaged, 1 - DECAY), opt_state, loss

    for step in range(args.steps):
        keys = jax.random.split(jax.random.key(step), args.batch)
        trained, averaged, opt_state, loss = train_step(trained, averaged, opt_state, images(step), keys)
        print(f"step {step} loss {loss:.9g}")
    print(f"norm of the averaged weights {optax.global_norm(averaged):.9g}")


def train_sharded():
    from crossframe import MeshSpec
    from crossframe.precision import PrecisionPolicy
    from jax_backend import apply_updates, make_mesh, shard, sharded_optimizer, value_and_grad

    mesh = make_mesh(MeshSpec(shard=jax.device_count()))
    policy = PrecisionPolicy("bfloat16", "float32") if args.precision == "bfloat16" else None
    trained = shard(params, mesh, units=("patch_embed", "blocks.0", "blocks.1"), mp_policy=policy)
    averaged = trained
    optimizer = sharded_optimizer(tx)
    opt_state = optimizer.init(trained)

    def loss_of_keys(params, batch):
        return mean_loss(params, batch, batch["keys"])

    def loss_of_rng(params, batch, rng):
        rng = batch["rng"][0] if args.mistake else rng
        return mean_loss(params, batch, jax.random.split(rng, len(batch["label"])))

    value_and_grads = value_and_grad(loss_of_rng if args.rng else loss_of_keys, mesh, mode=args.shard)

    @jax.jit
    def train_step(params, averaged, opt_state, batch, rng):
        result = value_and_grads(params, batch, rng=rng)
        updates, opt_state = optimizer.update(result.grads, opt_state, params)
        params = apply_updates(params, updates)
        return params, optax.incremental_update(params, averaged, 1 - DECAY), opt_state, result.loss

    for step in range(args.steps):
        batch, rng = images(step), jax.random.key(step)
        if not args.rng:
            batch["keys"], rng = jax.random.split(rng, args.batch), None
        elif args.mistake:
            batch["rng"] = jnp.stack([rng] * jax.device_count())
        trained, averaged, opt_state, loss = train_step(trained, averaged, opt_state, batch, rng)
        print(f"step {step} loss {loss:.9g}")
    print(f"norm of the averaged weights {optax.global_norm(averaged):.9g}")


if __name__ == "__main__":
    train_sharded() if args.shard else train_plain()
