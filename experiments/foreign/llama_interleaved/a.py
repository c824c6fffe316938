"""Llama of transformers in torch, whose rotary embedding rotates halves of a head."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from experiments.foreign.shared import cross_entropy, options, start_torch, tokens_of, train_torch

given = options()
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=16,
    rms_norm_eps=1e-5,
    initializer_range=0.2,
    attn_implementation="eager",
)
model = LlamaForCausalLM(config)
start_torch(given, model)
train_torch(
    model,
    lambda step: {"tokens": tokens_of(step, 4, 13, vocabulary=48)},
    lambda model, batch: cross_entropy(model(batch["tokens"][:, :-1]).logits, batch["tokens"][:, 1:]),
)
