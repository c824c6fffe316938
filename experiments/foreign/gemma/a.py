"""Gemma of litgpt in torch. Fault: the embedding is not scaled."""

import torch
from litgpt import GPT, Config

from experiments.foreign.shared import cross_entropy, options, start_torch, tokens_of, train_torch

given = options()
torch.manual_seed(0)
config = Config(
    name="Gemma-tiny",
    block_size=16,
    vocab_size=48,
    padded_vocab_size=48,
    scale_embeddings=not given.fault,
    n_layer=2,
    n_head=4,
    n_query_groups=2,
    n_embd=24,
    head_size=8,
    intermediate_size=40,
    rotary_percentage=1.0,
    parallel_residual=False,
    bias=False,
    norm_class_name="RMSNorm",
    norm_eps=1e-6,
    mlp_class_name="GemmaMLP",
    gelu_approximate="tanh",
)
model = GPT(config)
model.lm_head.weight = model.transformer.wte.weight
with torch.no_grad():
    model.lm_head.weight.mul_(0.2)
start_torch(given, model)
train_torch(
    model,
    lambda step: {"tokens": tokens_of(step, 4, 13, vocabulary=48)},
    lambda model, batch: cross_entropy(model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:]),
)
