"""A ConvNeXt of timm in torch: AdamW that decays weights alone, a linear warm-up, and clipping."""

import torch

from experiments.foreign.shared import (
    STEPS,
    cross_entropy,
    declare_torchvision_operators,
    images_of,
    options,
    start_torch,
    tensors_of,
    tokens_of,
)

operators = declare_torchvision_operators()
from timm.models.convnext import ConvNeXt  # noqa: E402

given = options()
torch.manual_seed(0)
model = ConvNeXt(num_classes=7, depths=(1, 2, 1, 1), dims=(8, 16, 24, 32), ls_init_value=0.1, head_init_scale=20.0)
start_torch(given, model)
weights = [value for value in model.parameters() if value.ndim > 1]
others = [value for value in model.parameters() if value.ndim == 1]
optimizer = torch.optim.AdamW(
    [{"params": weights, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}], lr=4e-3, betas=(0.9, 0.99)
)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=3)
model.train()
for step in range(STEPS):
    batch = tensors_of({"images": images_of(step, 8, 3, 32, 32), "labels": tokens_of(step, 8, vocabulary=7)})
    optimizer.zero_grad()
    loss = cross_entropy(model(batch["images"]), batch["labels"])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    print(f"step {step} loss {loss.item():.12f}")
