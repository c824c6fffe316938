"""A Swin transformer of timm in torch: windows of attention, shifted in every second block, and biases by relative position."""

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
from timm.models.swin_transformer import SwinTransformer  # noqa: E402

given = options()
torch.manual_seed(0)
model = SwinTransformer(
    img_size=32,
    patch_size=4,
    num_classes=7,
    embed_dim=12,
    depths=(2, 2),
    num_heads=(2, 4),
    window_size=4,
    drop_path_rate=0.0,
)
with torch.no_grad():
    for name, value in model.named_parameters():
        if name.endswith("relative_position_bias_table"):
            value.mul_(10)
start_torch(given, model)
train_torch(
    model,
    lambda step: {"images": images_of(step, 4, 3, 32, 32), "labels": tokens_of(step, 4, vocabulary=7)},
    lambda model, batch: cross_entropy(model(batch["images"]), batch["labels"]),
)
