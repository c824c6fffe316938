"""Mistral of transformers in torch, with a sliding window of four tokens."""

import torch
from transformers import MistralConfig, MistralForCausalLM

from experiments.foreign.shared import cross_entropy, options, start_torch, tokens_of, train_torch

given = options()
torch.manual_seed(0)
config = MistralConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=16,
    sliding_window=4,
    initializer_range=0.2,
    attn_implementation="eager",
)
model = MistralForCausalLM(config)
start_torch(given, model)
train_torch(
    model,
    lambda step: {"tokens": tokens_of(step, 4, 13, vocabulary=48)},
    lambda model, batch: cross_entropy(model(batch["tokens"][:, :-1]).logits, batch["tokens"][:, 1:]),
)
