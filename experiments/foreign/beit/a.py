"""BEiT of timm, whose keys have no bias: a rate by depth, a cosine schedule, two microbatches, and clipping.

Fault: gradients are clipped after the optimizer's step.
"""

import torch

from experiments.foreign.shared import (
    STEPS,
    cross_entropy,
    declare_torchvision_operators,
    halves_of,
    images_of,
    options,
    start_torch,
    tensors_of,
    tokens_of,
)

operators = declare_torchvision_operators()
from timm.models.beit import Beit  # noqa: E402

given = options()
torch.manual_seed(0)
model = Beit(
    img_size=16,
    patch_size=4,
    num_classes=7,
    embed_dim=24,
    depth=3,
    num_heads=3,
    mlp_ratio=2.0,
    init_values=0.1,
    use_abs_pos_emb=False,
    use_rel_pos_bias=True,
)
with torch.no_grad():
    for value in model.parameters():
        if value.ndim == 2:
            value.mul_(5)
start_torch(given, model)


def depth_of(name):
    return int(name.split(".")[1]) + 1 if name.startswith("blocks.") else 4 * name.startswith(("fc_norm.", "head."))


groups = [
    {"params": [value], "lr": 2e-3 * 0.65 ** (4 - depth_of(name)), "weight_decay": 0.05 * (value.ndim > 1)}
    for name, value in model.named_parameters()
]
optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99))
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
model.train()
for step in range(STEPS):
    batch = tensors_of({"images": images_of(step, 8, 3, 16, 16), "labels": tokens_of(step, 8, vocabulary=7)})
    optimizer.zero_grad()
    total = 0.0
    for half in halves_of(batch):
        loss = cross_entropy(model(half["images"]), half["labels"]) / 2
        loss.backward()
        total += loss.item()
    if given.fault:
        optimizer.step()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    if not given.fault:
        optimizer.step()
    schedule.step()
    print(f"step {step} loss {total:.12f}")
