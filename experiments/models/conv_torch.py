"""The convolutional net in torch. Written to be read beside `conv_flax.py`."""

from torch import Tensor, nn
from torch.nn import functional

from experiments.models.conv import ConvConfig


class Block(nn.Module):
    """Convolution, batch norm and SiLU, added to what comes in."""

    def __init__(self, config: ConvConfig) -> None:
        super().__init__()
        self.conv = nn.Conv2d(config.num_channels, config.num_channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(config.num_channels, config.norm_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.silu(self.norm(self.conv(x)))


class ConvNet(nn.Module):
    """Images (batch, 8, 8) to logits (batch, classes); torch has channels before height and width."""

    def __init__(self, config: ConvConfig) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, config.num_channels, 3, padding=1)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.num_blocks)])
        self.head = nn.Linear(config.num_channels, config.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images.unsqueeze(1))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((-2, -1)))
