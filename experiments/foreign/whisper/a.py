"""Whisper of transformers in torch. Fault: the positions of the text begin at 1 instead of 0."""

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

from experiments.foreign.shared import cross_entropy, images_of, options, start_torch, tokens_of, train_torch

given = options()
torch.manual_seed(0)
config = WhisperConfig(
    vocab_size=48,
    num_mel_bins=8,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=3,
    decoder_attention_heads=3,
    encoder_ffn_dim=96,
    decoder_ffn_dim=96,
    d_model=24,
    max_source_positions=12,
    max_target_positions=16,
    init_std=0.2,
    pad_token_id=None,
    use_cache=False,
    attn_implementation="eager",
)
model = WhisperForConditionalGeneration(config)
if given.fault:
    positions = model.model.decoder.embed_positions
    positions.forward = lambda tokens, **_: positions.weight[1 : tokens.shape[1] + 1]
start_torch(given, model)
train_torch(
    model,
    lambda step: {"mel": images_of(step, 4, 8, 24), "tokens": tokens_of(step, 4, 12, vocabulary=48)},
    lambda model, batch: cross_entropy(
        model(batch["mel"], decoder_input_ids=batch["tokens"][:, :-1]).logits, batch["tokens"][:, 1:]
    ),
)
