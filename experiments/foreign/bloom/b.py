"""BLOOM of transformers in flax. Fault: the residual is taken after the norm."""

import jax.numpy as jnp
import optax
from transformers import BloomConfig, FlaxBloomForCausalLM
from transformers.modeling_flax_pytorch_utils import convert_pytorch_state_dict_to_flax

from experiments.foreign.shared import flat, linen_modules, options, tokens_of, train_jax

given = options()
config = BloomConfig(
    vocab_size=48,
    hidden_size=24,
    n_layer=2,
    n_head=4,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    apply_residual_connection_post_layernorm=given.fault,
)
model = FlaxBloomForCausalLM(config, dtype=jnp.float32, input_shape=(1, 12))


def convert(arrays):
    return flat(convert_pytorch_state_dict_to_flax(dict(arrays), model))


@linen_modules
def loss_fn(params, batch):
    logits = model(batch["tokens"][:, :-1], params=params, train=True).logits
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


train_jax(
    given,
    model.params,
    convert,
    lambda step: {"tokens": tokens_of(step, 4, 13, vocabulary=48)},
    loss_fn,
    name="BloomForCausalLM",
    samples=lambda batch: batch["tokens"][:, :-1],
)
