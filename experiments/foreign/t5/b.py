"""T5 of transformers in flax. Fault: relative positions are bucketed up to another distance."""

import jax.numpy as jnp
import optax
from transformers import FlaxT5ForConditionalGeneration, T5Config
from transformers.modeling_flax_pytorch_utils import convert_pytorch_state_dict_to_flax

from experiments.foreign.shared import flat, linen_modules, options, tokens_of, train_jax

given = options()
clip = jnp.clip
jnp.clip = lambda x, a_min=None, a_max=None: clip(x, a_min, a_max)  # the arguments' names before JAX 0.10
config = T5Config(
    vocab_size=48,
    d_model=24,
    d_kv=6,
    d_ff=40,
    num_layers=2,
    num_heads=4,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=24 if given.fault else 16,
    dropout_rate=0.0,
    decoder_start_token_id=0,
    use_cache=False,
)
model = FlaxT5ForConditionalGeneration(config, input_shape=(1, 14))


def convert(arrays):
    return flat(convert_pytorch_state_dict_to_flax(dict(arrays), model))


@linen_modules
def loss_fn(params, batch):
    targets = batch["targets"]
    logits = model(batch["tokens"], decoder_input_ids=targets[:, :-1], params=params, train=True).logits
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets[:, 1:]).mean()


train_jax(
    given,
    model.params,
    convert,
    lambda step: {
        "tokens": tokens_of(step, 4, 14, vocabulary=48),
        "targets": tokens_of(100 + step, 4, 11, vocabulary=48),
    },
    loss_fn,
    name="T5ForConditionalGeneration",
    samples=lambda batch: [batch["tokens"], batch["targets"][:, :-1]],
)
