"""The mixture of experts in torch. Written to be read beside `moe_flax.py`."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.models.moe import MoEConfig


class Expert(nn.Module):
    """Two linear layers around a SiLU."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.expert_width)
        self.down = nn.Linear(config.expert_width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.up(x)))


class Block(nn.Module):
    """The weighted sum of the chosen experts, added to what comes in. All experts compute; a weight of 0 leaves one out."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.num_chosen = config.num_chosen
        self.router = nn.Linear(config.width, config.num_experts, bias=False)
        self.experts = nn.ModuleList([Expert(config) for _ in range(config.num_experts)])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(dim=-1)
        chosen = weights.topk(self.num_chosen, dim=-1).indices
        weights = weights * torch.zeros_like(weights).scatter(-1, chosen, 1.0)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        for i, expert in enumerate(self.experts):
            x = x + weights[:, i : i + 1] * expert(x)
        return x


class MoE(nn.Module):
    """Images (batch, 8, 8) to logits (batch, classes)."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.inp = nn.Linear(config.num_pixels, config.width)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.num_blocks)])
        self.head = nn.Linear(config.width, config.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.inp(images.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)
