"""BART of transformers in torch: an encoder and a decoder, trained on two microbatches whose sum is clipped."""

import torch
from transformers import BartConfig, BartForConditionalGeneration

from experiments.foreign.shared import STEPS, cross_entropy, halves_of, options, start_torch, tensors_of, tokens_of

given = options()
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
config = BartConfig(
    vocab_size=48,
    d_model=24,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=3,
    decoder_attention_heads=3,
    encoder_ffn_dim=40,
    decoder_ffn_dim=40,
    max_position_embeddings=16,
    dropout=0.0,
    pad_token_id=0,
    init_std=0.2,
    use_cache=False,
    attn_implementation="eager",
)
model = BartForConditionalGeneration(config)
start_torch(given, model)
weights = [value for value in model.parameters() if value.ndim > 1]
others = [value for value in model.parameters() if value.ndim == 1]
optimizer = torch.optim.AdamW(
    [{"params": weights, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}], lr=3e-3
)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.25, total_iters=3)
model.train()
for step in range(STEPS):
    source, target = tokens_of(step, 8, 14, vocabulary=48), tokens_of(100 + step, 8, 11, vocabulary=48)
    optimizer.zero_grad()
    total = 0.0
    for half in halves_of(tensors_of({"source": source, "target": target})):
        logits = model(half["source"], decoder_input_ids=half["target"][:, :-1]).logits
        loss = cross_entropy(logits, half["target"][:, 1:]) / 2
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    print(f"step {step} loss {total:.12f}")
