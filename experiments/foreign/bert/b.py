"""BERT of transformers in flax. Fault: GELU by its tanh approximation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from transformers import BertConfig, FlaxBertForMaskedLM
from transformers.modeling_flax_pytorch_utils import convert_pytorch_state_dict_to_flax

from experiments.foreign.shared import flat, linen_modules, options, tokens_of, train_jax

given = options()
jax.config.update("jax_enable_x64", True)
config = BertConfig(
    vocab_size=40,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=16,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    hidden_act="gelu_new" if given.fault else "gelu",
)
model = FlaxBertForMaskedLM(config, dtype=jnp.float64, input_shape=(1, 12))


def batch_of(step):
    tokens = tokens_of(step, 6, 12, vocabulary=40)
    masked = np.random.default_rng(step).random(tokens.shape) < 0.25
    real = np.arange(12) < np.random.default_rng(step + 50).integers(8, 13, (6, 1))
    return {
        "tokens": np.where(masked, 1, tokens),
        "labels": np.where(masked & real, tokens, -100),
        "mask": real.astype(np.int64),
    }


def convert(arrays):
    found = flat(convert_pytorch_state_dict_to_flax(dict(arrays), model))
    return {path: value for path, value in found.items() if path in flat(model.params)}


@linen_modules
def loss_fn(params, batch):
    logits = model(batch["tokens"], batch["mask"], params=params, train=True).logits
    is_asked = batch["labels"] >= 0
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(is_asked, batch["labels"], 0))
    return (losses * is_asked).sum() / is_asked.sum()


train_jax(
    given,
    model.params,
    convert,
    batch_of,
    loss_fn,
    name="BertForMaskedLM",
    samples=lambda batch: [batch["tokens"], batch["mask"], batch["labels"]],
)
