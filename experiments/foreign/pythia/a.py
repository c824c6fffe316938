"""GPT-NeoX of transformers in torch: queries, keys and values of a head lie together in one matrix."""

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from experiments.foreign.shared import cross_entropy, options, start_torch, tokens_of, train_torch

given = options()
torch.manual_seed(0)
config = GPTNeoXConfig(
    vocab_size=48,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=16,
    rotary_pct=0.5,
    initializer_range=0.2,
    attn_implementation="eager",
)
model = GPTNeoXForCausalLM(config)
start_torch(given, model)
train_torch(
    model,
    lambda step: {"tokens": tokens_of(step, 4, 13, vocabulary=48)},
    lambda model, batch: cross_entropy(model(batch["tokens"][:, :-1]).logits, batch["tokens"][:, 1:]),
)
