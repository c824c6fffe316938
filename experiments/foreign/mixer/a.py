"""An MLP-Mixer of timm: RMSprop with momentum, an exponential schedule, and values that are clipped one by one."""

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
from timm.models.mlp_mixer import MlpMixer  # noqa: E402

given = options()
torch.manual_seed(0)
model = MlpMixer(
    num_classes=7,
    img_size=16,
    patch_size=4,
    num_blocks=3,
    embed_dim=24,
    mlp_ratio=(1.5, 2.0),
    norm_layer=partial(torch.nn.LayerNorm, eps=1e-5),
)
torch.nn.init.normal_(model.head.weight, std=0.3)  # timm starts with zeros
start_torch(given, model)
optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-4, alpha=0.9, momentum=0.9, weight_decay=1e-5, eps=1e-3)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.97)
model.train()
for step in range(STEPS):
    batch = tensors_of({"images": images_of(step, 8, 3, 16, 16), "labels": tokens_of(step, 8, vocabulary=7)})
    optimizer.zero_grad()
    loss = cross_entropy(model(batch["images"]), batch["labels"])
    loss.backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
    optimizer.step()
    schedule.step()
    print(f"step {step} loss {loss.item():.12f}")
