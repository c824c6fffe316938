"""MPT of transformers in torch, scores with a bias by distance: NAdam with decoupled decay, two microbatches, and clipping."""

import torch
from transformers import MptConfig, MptForCausalLM

from experiments.foreign.shared import STEPS, cross_entropy, halves_of, options, start_torch, tensors_of, tokens_of

given = options()
torch.manual_seed(0)
config = MptConfig(
    d_model=32,
    n_heads=4,
    n_layers=3,
    expansion_ratio=4,
    max_seq_len=16,
    vocab_size=48,
    initializer_range=0.2,
    use_cache=False,
)
model = MptForCausalLM(config)
start_torch(given, model)
others = [value for name, value in model.named_parameters() if value.ndim == 1 or ".wte." in name]
decayed = [value for name, value in model.named_parameters() if value.ndim > 1 and ".wte." not in name]
optimizer = torch.optim.NAdam(
    [{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=2e-3, decoupled_weight_decay=True
)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=6, cycle_momentum=False)
model.train()
for step in range(STEPS):
    total = 0.0
    for half in halves_of(tensors_of({"tokens": tokens_of(step, 8, 13, vocabulary=48)})):
        loss = cross_entropy(model(half["tokens"][:, :-1]).logits, half["tokens"][:, 1:]) / 2
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    print(f"step {step} loss {total:.12f}")
