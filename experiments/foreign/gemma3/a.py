"""Gemma 3 of transformers in torch: norms of queries and keys, before and after each branch, and local and global layers.

Fault: local layers have the rotary base of global ones.
"""

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from experiments.foreign.shared import cross_entropy, options, start_torch, tokens_of, train_torch

given = options()
torch.manual_seed(0)
config = Gemma3TextConfig(
    vocab_size=48,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    query_pre_attn_scalar=8,
    sliding_window=5,
    rope_theta=1_000_000.0,
    rope_local_base_freq=1_000_000.0 if given.fault else 10_000.0,
    max_position_embeddings=16,
    rms_norm_eps=1e-6,
    initializer_range=0.2,
    use_cache=False,
    pad_token_id=None,
    attn_implementation="eager",
)
model = Gemma3ForCausalLM(config)
start_torch(given, model)
train_torch(
    model,
    lambda step: {"tokens": tokens_of(step, 4, 13, vocabulary=48)},
    lambda model, batch: cross_entropy(model(batch["tokens"][:, :-1]).logits, batch["tokens"][:, 1:]),
)
