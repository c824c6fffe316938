"""A DenseNet of torchvision without its first ReLU, which bonsai lacks: momentum, L2 decay, and a schedule of steps."""

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
from torchvision.models.densenet import DenseNet  # noqa: E402

given = options()
torch.manual_seed(0)
model = DenseNet(growth_rate=4, block_config=(2, 2, 2), num_init_features=8, num_classes=7)
model.features.relu0 = torch.nn.Identity()
start_torch(given, model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-3)
schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2], gamma=0.1)
model.train()
for step in range(STEPS):
    batch = tensors_of({"images": images_of(step, 8, 3, 33, 33), "labels": tokens_of(step, 8, vocabulary=7)})
    optimizer.zero_grad()
    loss = cross_entropy(model(batch["images"]), batch["labels"])
    loss.backward()
    optimizer.step()
    schedule.step()
    print(f"step {step} loss {loss.item():.12f}")
