"""Qwen3 of litgpt in torch. Fault: another base of the rotary embedding."""

import torch
from litgpt import GPT, Config

from experiments.foreign.shared import cross_entropy, options, start_torch, tokens_of, train_torch

given = options()
torch.manual_seed(0)
config = Config(
    name="Qwen3-tiny",
    block_size=16,
    vocab_size=48,
    padded_vocab_size=48,
    n_layer=2,
    n_head=4,
    n_query_groups=2,
    n_embd=24,
    head_size=8,
    intermediate_size=40,
    rotary_percentage=1.0,
    rope_base=10_000 if given.fault else 1_000_000,
    parallel_residual=False,
    bias=False,
    norm_class_name="RMSNorm",
    norm_eps=1e-6,
    norm_qk=True,
    mlp_class_name="LLaMAMLP",
)
model = GPT(config)
start_torch(given, model)
train_torch(
    model,
    lambda step: {"tokens": tokens_of(step, 4, 13, vocabulary=48)},
    lambda model, batch: cross_entropy(model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:]),
)
