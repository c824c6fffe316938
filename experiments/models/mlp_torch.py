"""MLP in torch. Written to be read beside `mlp_flax.py`."""

from torch import Tensor, nn
from torch.nn import functional

from experiments.models.mlp import MLPConfig


class Layer(nn.Module):
    """A linear layer and a SiLU, added to what comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.silu(self.linear(x))


class MLP(nn.Module):
    """Images (batch, 8, 8) to logits (batch, classes)."""

    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        self.inp = nn.Linear(config.num_pixels, config.width)
        self.layers = nn.ModuleList([Layer(config.width) for _ in range(config.num_layers)])
        self.head = nn.Linear(config.width, config.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.inp(images.flatten(1))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
