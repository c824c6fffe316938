"""A residual net of timm in torch. Fault: another epsilon in the batch norm of the stem."""

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
from timm.models.resnet import Bottleneck, ResNet  # noqa: E402

given = options()
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = ResNet(Bottleneck, (1, 2, 1, 1), num_classes=7, channels=(8, 16, 24, 32), zero_init_last=False)
if given.fault:
    model.bn1.eps = 1e-3
start_torch(given, model)
train_torch(
    model,
    lambda step: {"images": images_of(step, 6, 3, 32, 32).astype(float), "labels": tokens_of(step, 6, vocabulary=7)},
    lambda model, batch: cross_entropy(model(batch["images"]), batch["labels"]),
)
