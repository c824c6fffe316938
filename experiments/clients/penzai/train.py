"""Trains a small Gemma-like language model of penzai on padded random texts, with optax.

python train.py [--shard shard_map|jit] [--dtype float32|bfloat16] [--accumulate 2] [--mistake]
"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from penzai import pz
from penzai.models.transformer.variants import llamalike_common as llamalike

parser = argparse.ArgumentParser()
parser.add_argument("--shard", choices=["shard_map", "jit"], help="Shard over all devices; default: plain JAX.")
parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="Of the activations.")
parser.add_argument("--accumulate", type=int, default=1, help="Batches of an update, by optax.MultiSteps.")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument(
    "--mistake", action="store_true", help="Each device averages over its own tokens, without a weight."
)
args = parser.parse_args()

VOCABULARY, LENGTH = 40, 12

config = llamalike.LlamalikeTransformerConfig(
    num_kv_heads=1,
    query_head_multiplier=2,
    embedding_dim=16,
    projection_dim=8,
    mlp_hidden_dim=24,
    num_decoder_blocks=2,
    vocab_size=VOCABULARY,
    mlp_variant="geglu_approx",
    tie_embedder_and_logits=True,
    attention_type=(llamalike.AttentionTypeSlidingWindowCausal(4), llamalike.AttentionTypeGlobalCausal()),
    use_post_attn_norm=True,
    final_logit_softcap=5.0,
    attn_logits_soft_cap=10.0,
    activation_dtype=jnp.dtype(args.dtype),
)
model = llamalike.build_llamalike_transformer(config, jax.random.key(0))
unbound, frozen_params = pz.unbind_params(model, freeze=True)
params = {param.label: param.value for param in frozen_params}  # named arrays
decay_mask = {label: label.endswith("linear.weights") for label in params}


def texts(step):
    random = np.random.default_rng(step)
    tokens = random.integers(1, VOCABULARY, size=(args.batch, LENGTH + 1))
    lengths = random.integers(4, LENGTH + 2, size=(args.batch, 1))
    return {"tokens": np.where(np.arange(LENGTH + 1) < lengths, tokens, 0).astype(np.int32)}


def sum_and_number(params, batch):
    """The sum of the losses of tokens, padding apart, and their number."""
    values = [dataclasses.replace(param, value=params[param.label]) for param in frozen_params]
    bound = pz.bind_variables(unbound, values)
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    named = pz.nx.wrap(inputs).tag("batch", "seq")
    positions = pz.nx.arange("seq", LENGTH)
    logits = bound(named, token_positions=positions).unwrap("batch", "seq", "vocabulary")
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
    return jnp.sum(jnp.where(targets > 0, losses, 0.0)), jnp.sum(targets > 0)


def make_optimizer(decayed):
    schedule = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 2, 12)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1, mask=decayed))
    return optax.MultiSteps(tx, args.accumulate).gradient_transformation() if args.accumulate > 1 else tx


def train_plain():
    tx = make_optimizer(decay_mask)
    trained, opt_state = params, tx.init(params)

    def loss_fn(params, batch):
        total, number = sum_and_number(params, batch)
        return total / number

    @jax.jit
    def train_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for step in range(args.steps):
        trained, opt_state, loss = train_step(trained, opt_state, texts(step))
        print(f"step {step} loss {loss:.9g}")


def train_sharded():
    from crossframe import MeshSpec
    from jax_backend import LossOutput, apply_updates, make_mesh, shard, sharded_optimizer, value_and_grad

    mesh = make_mesh(MeshSpec(shard=jax.device_count()))
    trained = shard(params, mesh)
    # The optimizer sees a dict by path: "<label>.data_array".
    optimizer = sharded_optimizer(make_optimizer(lambda by_path: {path: "linear.weights" in path for path in by_path}))
    opt_state = optimizer.init(trained)

    def loss_fn(params, batch):
        total, number = sum_and_number(params, batch)
        return LossOutput(total / number, weight=None if args.mistake else number)

    value_and_grads = value_and_grad(loss_fn, mesh, mode=args.shard)

    @jax.jit
    def train_step(params, opt_state, batch):
        result = value_and_grads(params, batch)
        updates, opt_state = optimizer.update(result.grads, opt_state, params)
        return apply_updates(params, updates), opt_state, result.loss

    for step in range(args.steps):
        trained, opt_state, loss = train_step(trained, opt_state, texts(step))
        print(f"step {step} loss {loss:.9g}")


if __name__ == "__main__":
    train_sharded() if args.shard else train_plain()
