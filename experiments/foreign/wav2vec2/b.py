"""wav2vec 2.0 of transformers in flax. Fault: GELU of the convolutions by its tanh approximation."""

import jax.numpy as jnp
import optax
from transformers import FlaxWav2Vec2ForCTC, Wav2Vec2Config
from transformers.modeling_flax_pytorch_utils import convert_pytorch_state_dict_to_flax

from experiments.foreign.shared import flat, images_of, linen_modules, options, tokens_of, train_jax

given = options()
config = Wav2Vec2Config(
    vocab_size=13,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=40,
    feat_extract_norm="layer",
    do_stable_layer_norm=True,
    conv_dim=(16, 16, 20),
    conv_stride=(5, 2, 2),
    conv_kernel=(10, 3, 2),
    conv_bias=True,
    num_conv_pos_embeddings=6,
    num_conv_pos_embedding_groups=4,
    hidden_dropout=0.0,
    activation_dropout=0.0,
    attention_dropout=0.0,
    feat_proj_dropout=0.0,
    final_dropout=0.0,
    layerdrop=0.0,
    apply_spec_augment=False,
    mask_time_prob=0.05,
    feat_extract_activation="gelu_new" if given.fault else "gelu",
)
model = FlaxWav2Vec2ForCTC(config, dtype=jnp.float32, input_shape=(1, 400))


def convert(arrays):
    return flat(convert_pytorch_state_dict_to_flax(dict(arrays), model))


@linen_modules
def loss_fn(params, batch):
    logits = model(batch["waves"], params=params, train=True).logits
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


train_jax(
    given,
    model.params,
    convert,
    lambda step: {"waves": images_of(step, 4, 400), "labels": tokens_of(step, 4, 19, vocabulary=13)},
    loss_fn,
    name="Wav2Vec2ForCTC",
    samples=lambda batch: batch["waves"],
)
