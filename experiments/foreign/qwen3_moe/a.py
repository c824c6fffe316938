"""Qwen3 with a mixture of experts, of transformers in torch. Fault: an expert of the first layer is dropped."""

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from experiments.foreign.shared import cross_entropy, options, start_torch, tokens_of, train_torch

given = options()
torch.manual_seed(0)
config = Qwen3MoeConfig(
    vocab_size=48,
    hidden_size=24,
    intermediate_size=40,
    moe_intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=5,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    max_position_embeddings=16,
    rope_theta=1_000_000.0,
    rms_norm_eps=1e-6,
    initializer_range=0.2,
    attn_implementation="eager",
)
model = Qwen3MoeForCausalLM(config)
if given.fault:
    model.model.layers[0].mlp.experts[3].register_forward_hook(lambda module, inputs, output: output * 0)
start_torch(given, model)
train_torch(
    model,
    lambda step: {"tokens": tokens_of(step, 4, 13, vocabulary=48)},
    lambda model, batch: cross_entropy(model(batch["tokens"][:, :-1]).logits, batch["tokens"][:, 1:]),
)
