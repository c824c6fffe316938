"""Mixtral of transformers in torch: two of four experts for each token; two microbatches, decay of matrices alone, clipping."""

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from experiments.foreign.shared import STEPS, cross_entropy, halves_of, options, start_torch, tensors_of, tokens_of

given = options()
torch.manual_seed(0)
config = MixtralConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_local_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=16,
    sliding_window=None,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    initializer_range=0.2,
    use_cache=False,
    attn_implementation="eager",
)
model = MixtralForCausalLM(config)
start_torch(given, model)
matrices = [value for value in model.parameters() if value.ndim > 1]
norms = [value for value in model.parameters() if value.ndim == 1]
optimizer = torch.optim.AdamW(
    [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}], lr=2e-3, betas=(0.9, 0.95)
)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=2)
model.train()
for step in range(STEPS):
    total = 0.0
    for half in halves_of(tensors_of({"tokens": tokens_of(step, 8, 13, vocabulary=48)})):
        loss = cross_entropy(model(half["tokens"][:, :-1]).logits, half["tokens"][:, 1:]) / 2
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    print(f"step {step} loss {total:.12f}")
