"""Mamba of transformers in torch: a state space model, whose layers begin with equal decays and skips."""

import torch
from transformers import MambaConfig, MambaForCausalLM

from experiments.foreign.shared import cross_entropy, options, start_torch, tokens_of, train_torch

given = options()
torch.manual_seed(0)
config = MambaConfig(
    vocab_size=48,
    hidden_size=24,
    state_size=6,
    num_hidden_layers=2,
    expand=2,
    conv_kernel=4,
    time_step_rank=3,
    layer_norm_epsilon=1e-5,
    residual_in_fp32=False,
    tie_word_embeddings=False,
    initializer_range=0.3,
    use_cache=False,
)
model = MambaForCausalLM(config)
start_torch(given, model)
train_torch(
    model,
    lambda step: {"tokens": tokens_of(step, 4, 13, vocabulary=48)},
    lambda model, batch: cross_entropy(model(batch["tokens"][:, :-1]).logits, batch["tokens"][:, 1:]),
)
