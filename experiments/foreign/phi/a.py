"""Phi-2 of transformers in torch: one norm for both branches, and a bias everywhere."""

import torch
from transformers import PhiConfig, PhiForCausalLM

from experiments.foreign.shared import cross_entropy, options, start_torch, tokens_of, train_torch

given = options()
torch.manual_seed(0)
config = PhiConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    partial_rotary_factor=0.5,
    max_position_embeddings=16,
    layer_norm_eps=1e-5,
    initializer_range=0.2,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attention_dropout=0.0,
    hidden_act="gelu_new",
    use_cache=False,
    attn_implementation="eager",
)
model = PhiForCausalLM(config)
start_torch(given, model)
train_torch(
    model,
    lambda step: {"tokens": tokens_of(step, 4, 13, vocabulary=48)},
    lambda model, batch: cross_entropy(model(batch["tokens"][:, :-1]).logits, batch["tokens"][:, 1:]),
)
