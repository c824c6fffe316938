"""GPT-2 of transformers in torch."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from experiments.foreign.shared import cross_entropy, options, start_torch, tokens_of, train_torch

given = options()
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
config = GPT2Config(
    vocab_size=48,
    n_positions=16,
    n_embd=24,
    n_layer=2,
    n_head=3,
    initializer_range=0.2,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    attn_implementation="eager",
)
model = GPT2LMHeadModel(config)
start_torch(given, model)
train_torch(
    model,
    lambda step: {"tokens": tokens_of(step, 4, 13, vocabulary=48)},
    lambda model, batch: cross_entropy(model(batch["tokens"][:, :-1]).logits, batch["tokens"][:, 1:]),
)
