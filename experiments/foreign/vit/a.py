"""A vision transformer of timm in torch. Fault: scores are scaled by the root of the width instead of that of a head's."""

import torch

from experiments.foreign.shared import (
    cross_entropy,
    declare_torchvision_operators,
    images_of,
    options,
    start_torch,
    tokens_of,
    train_torch,
)

operators = declare_torchvision_operators()
from timm.models.vision_transformer import VisionTransformer  # noqa: E402

given = options()
torch.manual_seed(0)
model = VisionTransformer(img_size=12, patch_size=4, embed_dim=24, depth=2, num_heads=3, num_classes=7)
for block in model.blocks:
    block.attn.fused_attn = False
    if given.fault:
        block.attn.scale = 24**-0.5
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn_like(parameter))  # timm's values are so small that attention is uniform
start_torch(given, model)
train_torch(
    model,
    lambda step: {
        "images": images_of(step, 6, 3, 12, 12),
        "labels": tokens_of(step, 6, vocabulary=7),
    },
    lambda model, batch: cross_entropy(model(batch["images"]), batch["labels"]),
)
