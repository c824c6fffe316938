"""Small torch models, each with what tends to go wrong: uneven sizes, sharing, buffers, frozen and unused parameters."""

import torch
from torch import Tensor, nn

from tests.on_torch.helpers.device import DEVICE


def seed_cpu(seed: int) -> None:
    """On a CPU seed its generator alone: torch.manual_seed formats the stack of each call for accelerators that start later."""
    seeding = torch.default_generator if DEVICE.type == "cpu" else torch
    seeding.manual_seed(seed)


class Block(nn.Module):
    """A residual block with uneven sizes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width + 3)
        self.down = nn.Linear(width + 3, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, head; `tied` shares the embedding with the head."""

    def __init__(self, depth: int = 3, width: int = 7, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 11)
        self.register_buffer("scale", torch.tensor([2.0]))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def build_net(dtype: torch.dtype = torch.float32, seed: int = 3, **options) -> Net:
    """The same Net on every rank."""
    seed_cpu(seed)
    return Net(**options).to(dtype)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one rank at one step."""
    generator = torch.Generator(DEVICE).manual_seed(1000 * step + rank)
    tokens = torch.randint(0, 11, (4, 6), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    """Cross entropy on the rank's batch."""
    tokens, targets = batch(step, rank)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


class Spectral(nn.Module):
    """Multiplies the frequencies of its input by complex weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width // 2 + 1, width // 2 + 1, dtype=torch.complex64) / width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) @ self.weight, n=x.shape[-1])
