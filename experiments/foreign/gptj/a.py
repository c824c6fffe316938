"""GPT-J of transformers in torch: pairs of elements are rotated, and attention is beside the MLP.

Fault: scores of attention are not divided by the root of a head's width.
"""

import torch
from transformers import GPTJConfig, GPTJForCausalLM

from experiments.foreign.shared import STEPS, cross_entropy, options, start_torch, tensors_of, tokens_of

given = options()
torch.manual_seed(0)
config = GPTJConfig(
    vocab_size=48,
    n_positions=16,
    n_embd=32,
    n_layer=2,
    n_head=4,
    rotary_dim=4,
    n_inner=64,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    initializer_range=0.2,
    use_cache=False,
    attn_implementation="eager",
)
model = GPTJForCausalLM(config)
if given.fault:
    for layer in model.transformer.h:
        layer.attn.scale_attn = torch.tensor(1.0)
start_torch(given, model)
matrices = [value for value in model.parameters() if value.ndim > 1]
others = [value for value in model.parameters() if value.ndim == 1]
optimizer = torch.optim.AdamW(
    [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-3, betas=(0.9, 0.95)
)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS, eta_min=1e-4)
model.train()
for step in range(STEPS):
    batch = tensors_of({"tokens": tokens_of(step, 6, 13, vocabulary=48)})
    loss = cross_entropy(model(batch["tokens"][:, :-1]).logits, batch["tokens"][:, 1:])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"step {step} loss {loss.item():.12f}")
