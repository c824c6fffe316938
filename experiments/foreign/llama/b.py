"""Llama of levanter in haliax and equinox: all layers are stacked, for a scan."""

import haliax as hax
import jax
import jax.numpy as jnp
import optax
from haliax.state_dict import from_torch_compatible_state_dict
from levanter.layers.attention import AttentionMask
from levanter.models.llama import LlamaConfig, LlamaLMHeadModel

from experiments.foreign.shared import flat, options, tokens_of, train_jax
from jax_backend.equinox import split, with_params

given = options()
config = LlamaConfig(
    seq_len=12,
    hidden_dim=32,
    intermediate_dim=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    layer_norm_epsilon=1e-5,
    gradient_checkpointing=False,
)
model = LlamaLMHeadModel.init(hax.Axis("vocab", 48), config, key=jax.random.key(0))
static, params, _ = split(model)


def convert(arrays):
    return flat(split(from_torch_compatible_state_dict(model, dict(arrays)))[1])


def loss_fn(params, batch):
    tokens = hax.named(jnp.asarray(batch["tokens"][:, :-1]), ("batch", "position"))
    logits = with_params(static, params)(tokens, AttentionMask.causal()).rearrange(("batch", "position", "vocab"))
    return optax.softmax_cross_entropy_with_integer_labels(logits.array, batch["tokens"][:, 1:]).mean()


train_jax(
    given,
    params,
    convert,
    lambda step: {"tokens": tokens_of(step, 4, 13, vocabulary=48)},
    loss_fn,
    name="LlamaForCausalLM",
    samples=lambda batch: batch["tokens"][:, :-1],
)
