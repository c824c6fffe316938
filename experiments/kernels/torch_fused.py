"""The transformer of `torch_matmul`, with the kernels that torch has; on several ranks under DistributedDataParallel."""

import os
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.kernels import values

DTYPE = getattr(torch, sys.argv[1])
WRAPPED = sys.argv[2:] == ["wrapped"]
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def rotated(x: Tensor) -> Tensor:
    """Each head turned by the angles of its position."""
    cos, sin = (torch.from_numpy(each).to(x.dtype) for each in values.angles(10000.0))
    half = x.shape[-1] // 2
    return x * torch.cat([cos, cos], -1) + x.roll(half, -1) * torch.cat([-sin, sin], -1)


class Block(nn.Module):
    """Attention and a gated MLP."""

    norm1: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    norm2: Tensor
    up: Tensor
    gate: Tensor
    down: Tensor

    def __init__(self, prefix: str) -> None:
        super().__init__()
        names = [name.removeprefix(prefix) for name in values.SHAPES if name.startswith(prefix)]
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.from_numpy(values.initial(prefix + name)).to(DTYPE)))

    def split(self, x: Tensor) -> Tensor:
        """(batch, time, width) to (batch, head, time, width of a head)."""
        return x.unflatten(-1, (values.HEADS, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Of shape (batch, time, width)."""
        normed = functional.rms_norm(x, (values.WIDTH,), self.norm1, 1e-5)
        query = rotated(self.split(functional.linear(normed, self.query)))
        key = rotated(self.split(functional.linear(normed, self.key)))
        value = self.split(functional.linear(normed, self.value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + functional.linear(mixed.transpose(1, 2).flatten(-2), self.out)
        normed = functional.rms_norm(x, (values.WIDTH,), self.norm2, 1e-5)
        hidden = functional.gelu(functional.linear(normed, self.up))
        gate = functional.relu(functional.linear(normed, self.gate)).square()
        return x + functional.linear(hidden * gate, self.down)


class Transformer(nn.Module):
    """Tokens to the mean loss over tokens that are not padding."""

    tokens: Tensor
    positions: Tensor
    norm: Tensor
    bias: Tensor
    head: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in values.SHAPES:
            if "." not in name:
                self.register_parameter(name, nn.Parameter(torch.from_numpy(values.initial(name)).to(DTYPE)))
        self.blocks = nn.ModuleList([Block(f"blocks.{i}.") for i in range(values.BLOCKS)])

    def forward(self, tokens: Tensor) -> Tensor:
        """Of shape (batch, context + 1)."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        places = torch.arange(inputs.shape[1])
        x = functional.embedding(inputs, self.tokens) + functional.embedding(places, self.positions)
        for block in self.blocks:
            x = block(x)
        normed = functional.layer_norm(x, (values.WIDTH,), self.norm, self.bias, 1e-5)
        logits = 3.0 * torch.tanh(functional.linear(normed, self.head) / 3.0)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=values.PADDING)


def main() -> None:
    """Two steps."""
    model: nn.Module = Transformer()
    if WRAPPED:
        values.join_group(RANK, RANKS)
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.01)
    for step in range(2):
        model(torch.from_numpy(values.batch(step, RANK))).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
