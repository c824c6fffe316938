"""wav2vec 2.0 of transformers in torch: strided convolutions, and a grouped one with weight norm for positions."""

import torch
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

from experiments.foreign.shared import cross_entropy, images_of, options, start_torch, tokens_of, train_torch

given = options()
torch.manual_seed(0)
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
    initializer_range=0.2,
    attn_implementation="eager",
)
model = Wav2Vec2ForCTC(config)
start_torch(given, model)
train_torch(
    model,
    lambda step: {"waves": images_of(step, 4, 400), "labels": tokens_of(step, 4, 19, vocabulary=13)},
    lambda model, batch: cross_entropy(model(batch["waves"]).logits, batch["labels"]),
)
