"""OLMo 2 of transformers in torch, norms of all queries and keys: padded sentences in two microbatches, a mean over tokens."""

import torch
from transformers import Olmo2Config, Olmo2ForCausalLM

from experiments.foreign.shared import STEPS, halves_of, options, padded_tokens_of, start_torch, tensors_of

given = options()
torch.manual_seed(0)
config = Olmo2Config(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=16,
    rms_norm_eps=1e-6,
    rope_theta=500000.0,
    pad_token_id=0,
    use_cache=False,
    initializer_range=0.2,
    attn_implementation="eager",
)
model = Olmo2ForCausalLM(config)
start_torch(given, model)
decayed = [value for name, value in model.named_parameters() if value.ndim > 1 and "embed" not in name]
others = [value for name, value in model.named_parameters() if value.ndim == 1 or "embed" in name]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=3e-3, betas=(0.9, 0.95)
)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
model.train()
for step in range(STEPS):
    batch = tensors_of(padded_tokens_of(step, 6, 13, vocabulary=48, labels=48))
    labels = torch.where(batch["mask"] > 0, batch["tokens"], -100)[:, 1:]
    count, total = (labels >= 0).sum(), 0.0
    for half, target in zip(halves_of(batch), labels.chunk(2), strict=True):
        logits = model(half["tokens"][:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum") / count
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    print(f"step {step} loss {total:.12f}")
