"""A distilled vision transformer of timm: lower rates for lower layers, a cosine schedule, and labels of a teacher."""

import math

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
from timm.models.deit import VisionTransformerDistilled  # noqa: E402

given = options()
torch.manual_seed(0)
model = VisionTransformerDistilled(
    img_size=16, patch_size=4, num_classes=7, embed_dim=24, depth=3, num_heads=3, mlp_ratio=2.0
)
with torch.no_grad():
    for value in model.parameters():
        if value.ndim == 2:
            value.mul_(5)
model.set_distilled_training(True)
start_torch(given, model)


def depth_of(name):
    return int(name.split(".")[1]) + 1 if name.startswith("blocks.") else 4 * name.startswith(("norm.", "head"))


groups = [
    {"params": [value], "lr": 3e-3 * 0.75 ** (4 - depth_of(name)), "weight_decay": 0.05 * (value.ndim > 1)}
    for name, value in model.named_parameters()
]
optimizer = torch.optim.AdamW(groups)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / STEPS)) / 2)
model.train()
for step in range(STEPS):
    batch = tensors_of(
        {
            "images": images_of(step, 6, 3, 16, 16),
            "labels": tokens_of(step, 6, vocabulary=7),
            "teacher": tokens_of(100 + step, 6, vocabulary=7),
        }
    )
    logits, distilled = model(batch["images"])
    loss = (cross_entropy(logits, batch["labels"]) + cross_entropy(distilled, batch["teacher"])) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    print(f"step {step} loss {loss.item():.12f}")
