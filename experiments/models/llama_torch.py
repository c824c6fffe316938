"""Llama in torch. Written to be read beside `llama_flax.py`. Modules are called as in Hugging Face's `LlamaForCausalLM`."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.models.llama import LlamaConfig, rotary


class Attention(nn.Module):
    """Causal self-attention, whose keys and values groups of query heads share, with rotary positions."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.q_proj = nn.Linear(config.width, config.num_heads * config.head_width, bias=False)
        self.k_proj = nn.Linear(config.width, config.num_kv_heads * config.head_width, bias=False)
        self.v_proj = nn.Linear(config.width, config.num_kv_heads * config.head_width, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_width, config.width, bias=False)

    def _split(self, x: Tensor) -> Tensor:
        """(batch, time, heads * width of a head) to (batch, head, time, width of a head)."""
        return x.unflatten(-1, (-1, self.config.head_width)).transpose(1, 2)

    def _turned(self, x: Tensor) -> Tensor:
        """Queries or keys, each turned by the angles of its place."""
        cos, sin = (torch.from_numpy(each).to(x) for each in rotary(self.config, x.shape[-2]))
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        query, key = self._turned(self._split(self.q_proj(x))), self._turned(self._split(self.k_proj(x)))
        group = self.config.num_heads // self.config.num_kv_heads
        key, value = (each.repeat_interleave(group, dim=1) for each in (key, self._split(self.v_proj(x))))
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        weights = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
        return self.o_proj((weights @ value).transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """SwiGLU: one projection gates another."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.mlp_width, bias=False)
        self.up_proj = nn.Linear(config.width, config.mlp_width, bias=False)
        self.down_proj = nn.Linear(config.mlp_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and MLP, each on normalised input and added to it."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.width, config.norm_epsilon)
        self.post_attention_layernorm = nn.RMSNorm(config.width, config.norm_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """Tokens (batch, time) to hidden values (batch, time, width)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList([Block(config) for _ in range(config.num_blocks)])
        self.norm = nn.RMSNorm(config.width, config.norm_epsilon)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Llama(nn.Module):
    """Tokens (batch, time) to logits (batch, time, vocabulary)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.model = Body(config)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.model(tokens))
