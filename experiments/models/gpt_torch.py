"""GPT in torch. Written to be read beside `gpt_flax.py`: the same operations in the same order."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.models.gpt import GPTConfig


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)

    def _split(self, x: Tensor) -> Tensor:
        """(batch, time, width) to (batch, head, time, width of a head)."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self._split(self.query(x)), self._split(self.key(x)), self._split(self.value(x))
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        weights = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
        return self.out((weights @ value).transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """Two linear layers around a GELU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and MLP, each on normalised input and added to it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, config.norm_epsilon)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width, config.norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Tokens (batch, time) to logits (batch, time, vocabulary)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.num_blocks)])
        self.norm = nn.LayerNorm(config.width, config.norm_epsilon)
        self.head = None if config.tied else nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return tied_logits(x, self.token_embedding.weight) if self.head is None else self.head(x)


def tied_logits(x: Tensor, weight: Tensor) -> Tensor:
    """The head that is the embedding of tokens, of shape (vocabulary, width)."""
    return x @ weight.T
