"""ALBERT of transformers in flax. Fault: the layer is called twice instead of three times."""

import jax
import jax.numpy as jnp
import optax
from transformers import AlbertConfig, FlaxAlbertForSequenceClassification
from transformers.modeling_flax_pytorch_utils import convert_pytorch_state_dict_to_flax

from experiments.foreign.shared import flat, linen_modules, options, tokens_of, train_jax

given = options()
jax.config.update("jax_enable_x64", True)
config = AlbertConfig(
    vocab_size=40,
    embedding_size=12,
    hidden_size=24,
    num_hidden_layers=2 if given.fault else 3,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=16,
    classifier_dropout_prob=0.0,
    num_labels=5,
)
model = FlaxAlbertForSequenceClassification(config, dtype=jnp.float64, input_shape=(1, 12))


def convert(arrays):
    return flat(convert_pytorch_state_dict_to_flax(dict(arrays), model))


@linen_modules
def loss_fn(params, batch):
    logits = model(batch["tokens"], params=params, train=True).logits
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


train_jax(
    given,
    model.params,
    convert,
    lambda step: {"tokens": tokens_of(step, 6, 12, vocabulary=40), "labels": tokens_of(50 + step, 6, vocabulary=5)},
    loss_fn,
    name="AlbertForSequenceClassification",
    samples=lambda batch: batch["tokens"],
)
