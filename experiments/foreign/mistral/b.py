"""Mistral of transformers in flax. Its window is larger by one than torch's of the same configuration, so that the right
value is less by one. Fault: the same configuration."""

import optax
from transformers import FlaxMistralForCausalLM, MistralConfig
from transformers.modeling_flax_pytorch_utils import convert_pytorch_state_dict_to_flax

from experiments.foreign.shared import flat, linen_modules, options, tokens_of, train_jax

given = options()
config = MistralConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=16,
    sliding_window=4 if given.fault else 3,
)
model = FlaxMistralForCausalLM(config, input_shape=(1, 12))


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
    name="MistralForCausalLM",
    samples=lambda batch: batch["tokens"][:, :-1],
)
