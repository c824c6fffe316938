"""GPT-2 of transformers in flax. Fault: the head is not tied to the embedding."""

import jax
import jax.numpy as jnp
import optax
from transformers import FlaxGPT2LMHeadModel, GPT2Config
from transformers.modeling_flax_pytorch_utils import convert_pytorch_state_dict_to_flax

from experiments.foreign.shared import flat, linen_modules, options, tokens_of, train_jax

given = options()
jax.config.update("jax_enable_x64", True)
config = GPT2Config(
    vocab_size=48,
    n_positions=16,
    n_embd=24,
    n_layer=2,
    n_head=3,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    tie_word_embeddings=not given.fault,
)
model = FlaxGPT2LMHeadModel(config, dtype=jnp.float64, input_shape=(1, 12))


def convert(arrays):
    found = flat(convert_pytorch_state_dict_to_flax(dict(arrays), model))
    if given.fault:
        found["lm_head.kernel"] = found["transformer.wte.embedding"].T
    return found


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
    name="GPT2LMHeadModel",
    samples=lambda batch: batch["tokens"][:, :-1],
)
