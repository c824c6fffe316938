"""CLIP of open_clip in torch: queries, keys and values of a layer are one parameter."""

import torch

from experiments.foreign.shared import (
    declare_torchvision_operators,
    images_of,
    options,
    start_torch,
    tokens_of,
    train_torch,
)

operators = declare_torchvision_operators()
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg  # noqa: E402

given = options()
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = CLIP(
    16,
    CLIPVisionCfg(layers=2, width=24, head_width=8, mlp_ratio=2.0, patch_size=4, image_size=12),
    CLIPTextCfg(context_length=9, vocab_size=40, width=20, heads=4, layers=2, mlp_ratio=2.0),
    quick_gelu=True,
).double()


def loss_of(model, batch):
    images, texts, scale = model(batch["images"], batch["tokens"])
    scores, labels = scale * images @ texts.T, torch.arange(len(images))
    return (torch.nn.functional.cross_entropy(scores, labels) + torch.nn.functional.cross_entropy(scores.T, labels)) / 2


start_torch(given, model)
train_torch(
    model,
    lambda step: {
        "images": images_of(step, 6, 3, 12, 12).astype(float),
        "tokens": tokens_of(step, 6, 9, vocabulary=40),
    },
    loss_of,
)
