"""An EfficientNet of torchvision: Nesterov's momentum, a cosine schedule, and an evaluation after two steps."""

from functools import partial

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
from torchvision.models.efficientnet import EfficientNet, MBConvConfig  # noqa: E402

given = options()
torch.manual_seed(0)
blocks = [
    MBConvConfig(1, 3, 1, 16, 16, 1),
    MBConvConfig(4, 3, 2, 16, 24, 2),
    MBConvConfig(4, 5, 2, 24, 32, 1),
]
model = EfficientNet(
    blocks,
    dropout=0.0,
    stochastic_depth_prob=0.0,
    num_classes=7,
    norm_layer=partial(torch.nn.BatchNorm2d, eps=1e-3, momentum=0.1),
    last_channel=48,
)
start_torch(given, model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)


def batch_of(step):
    return tensors_of({"images": images_of(step, 8, 3, 32, 32), "labels": tokens_of(step, 8, vocabulary=7)})


def evaluate():
    model.eval()
    with torch.no_grad():
        batch = batch_of(100)
        print(f"evaluation {cross_entropy(model(batch['images']), batch['labels']).item():.12f}")
    model.train()


model.train()
for step in range(STEPS):
    batch = batch_of(step)
    loss = cross_entropy(model(batch["images"]), batch["labels"])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    print(f"step {step} loss {loss.item():.12f}")
    if step == 1:
        evaluate()
