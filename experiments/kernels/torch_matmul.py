"""A transformer of kernels that are written out, in torch; on several ranks under FSDP."""

import math
import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

from experiments.kernels import values
from torch_backend import FullyShardedDataParallel, ModuleWrapPolicy

DTYPE = getattr(torch, sys.argv[1])
WRAPPED = sys.argv[2:] == ["wrapped"]
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class SquaredRelu(torch.autograd.Function):
    """Squared ReLU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Of any shape."""
        ctx.save_for_backward(x)
        return x.relu().square()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """By the chain rule."""
        (x,) = ctx.saved_tensors
        return grads[0] * 2.0 * x.relu()


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Divided by its root mean square."""
    squares = x.pow(2).mean(-1, keepdim=True)
    scale = torch.rsqrt(squares + 1e-5)
    return x * scale * weight


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Without its mean, divided by its deviation."""
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.pow(2).mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + 1e-5) * weight + bias


def rotated(x: Tensor) -> Tensor:
    """Each head turned by the angles of its position."""
    cos, sin = (torch.from_numpy(each).to(x.dtype) for each in values.angles(10000.0))
    first, second = x.chunk(2, -1)
    left = first * cos - second * sin
    right = second * cos + first * sin
    return torch.cat([left, right], -1)


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

    def attention(self, x: Tensor) -> Tensor:
        """Causal."""
        query = rotated(self.split(x @ self.query.T))
        key = rotated(self.split(x @ self.key.T))
        value = self.split(x @ self.value.T)
        scores = query @ key.transpose(-1, -2)
        scores = scores / math.sqrt(query.shape[-1])
        visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = scores.masked_fill(~visible, -math.inf)
        weights = scores.softmax(-1)
        mixed = weights @ value
        return mixed.transpose(1, 2).flatten(-2) @ self.out.T

    def mlp(self, x: Tensor) -> Tensor:
        """Gated by a squared ReLU."""
        hidden = nn.functional.gelu(x @ self.up.T)
        gate = SquaredRelu.apply(x @ self.gate.T)
        return (hidden * gate) @ self.down.T

    def forward(self, x: Tensor) -> Tensor:
        """Of shape (batch, time, width)."""
        x = x + self.attention(rms_norm(x, self.norm1))
        return x + self.mlp(rms_norm(x, self.norm2))


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
        x = self.tokens[inputs] + self.positions[places]
        for block in self.blocks:
            x = block(x)
        logits = layer_norm(x, self.norm, self.bias) @ self.head.T
        logits = 3.0 * torch.tanh(logits / 3.0)
        losses = logits.logsumexp(-1) - logits.gather(-1, targets[..., None])[..., 0]
        counted = (targets != values.PADDING).to(losses.dtype)
        return (losses * counted).sum() / counted.sum()


def main() -> None:
    """Two steps."""
    model: nn.Module = Transformer()
    if WRAPPED:
        values.join_group(RANK, RANKS)
        model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.01)
    for step in range(2):
        model(torch.from_numpy(values.batch(step, RANK))).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
