"""ViT in torch. Written to be read beside `vit_flax.py`."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.models.vit import ViTConfig


class Block(nn.Module):
    """Attention and MLP, each on normalised input and added to it."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, config.norm_epsilon)
        self.attention = nn.MultiheadAttention(config.width, config.num_heads, bias=False, batch_first=True)
        self.mlp_norm = nn.LayerNorm(config.width, config.norm_epsilon)
        self.up = nn.Linear(config.width, 2 * config.width)
        self.down = nn.Linear(2 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class ViT(nn.Module):
    """Images (batch, 8, 8) to logits (batch, classes)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(config.num_patches, config.width))
        self.patches = nn.Conv2d(1, config.width, config.patch, stride=config.patch)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.num_blocks)])
        self.head = nn.Linear(config.width, config.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images.unsqueeze(1)).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))
