"""An MLP-Mixer of mlp-mixer-pytorch: linear layers of flattened patches. Fault: GELU is approximated by a tanh."""

import torch
from mlp_mixer_pytorch import MLPMixer

from experiments.foreign.shared import (
    STEPS,
    cross_entropy,
    images_of,
    load_converted,
    options,
    tensors_of,
    tokens_of,
)

given = options()
model = MLPMixer(
    image_size=16,
    channels=3,
    patch_size=4,
    dim=24,
    depth=3,
    num_classes=7,
    expansion_factor=1.5,
    expansion_factor_token=2.0,
)
if given.fault:
    for module in model.modules():
        if isinstance(module, torch.nn.GELU):
            module.approximate = "tanh"


def convert(arrays):
    """By hand: mlp-mixer-pytorch has no converter."""
    patches = arrays["stem.proj.weight"].transpose(0, 2, 3, 1).reshape(24, 48)
    found = {"1.weight": patches, "1.bias": arrays["stem.proj.bias"]}
    names = {"5": "norm", "7": "head"}
    for i in range(3):
        a, b = f"blocks.{i}", f"{i + 2}"
        for place, mixed in enumerate(("tokens", "channels")):
            names[f"{b}.{place}.norm"] = f"{a}.norm{place + 1}"
            names[f"{b}.{place}.fn.0"] = f"{a}.mlp_{mixed}.fc1"
            names[f"{b}.{place}.fn.3"] = f"{a}.mlp_{mixed}.fc2"
    for b, a in names.items():
        weight = arrays[f"{a}.weight"]
        found[f"{b}.weight"] = weight[..., None] if ".mlp_tokens." in a else weight
        found[f"{b}.bias"] = arrays[f"{a}.bias"]
    return found


load_converted(given, model, convert)
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
