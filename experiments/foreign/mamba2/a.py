"""Mamba-2 of transformers in torch."""

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

from experiments.foreign.shared import cross_entropy, options, start_torch, tokens_of, train_torch

given = options()
torch.manual_seed(0)
config = Mamba2Config(
    vocab_size=48,
    hidden_size=24,
    num_heads=6,
    head_dim=8,
    state_size=10,
    num_hidden_layers=2,
    expand=2,
    conv_kernel=4,
    n_groups=1,
    chunk_size=8,
    layer_norm_epsilon=1e-5,
    tie_word_embeddings=True,
    initializer_range=0.3,
    use_cache=False,
    pad_token_id=None,
)
model = Mamba2ForCausalLM(config)
start_torch(given, model)
train_torch(
    model,
    lambda step: {"tokens": tokens_of(step, 4, 14, vocabulary=48)},
    lambda model, batch: cross_entropy(model(batch["tokens"][:, :-1]).logits, batch["tokens"][:, 1:]),
)
