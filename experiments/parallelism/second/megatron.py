"""A transformer with weights that are divided without DTensors, marked by Megatron-LM's attributes on parameters.

A divided parameter has `tensor_model_parallel`, `partition_dim` and `partition_stride`: with a stride of 2, a rank has the same
part of both halves. Under sequence parallelism, the loop sums the gradients of parameters with `sequence_parallel` over the axis.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from experiments.parallelism.axis import Axis

WIDTH, HEADS, VOCABULARY, LENGTH, LAYERS = 16, 4, 32, 8, 2


def divided(full: Tensor, axis: Axis | None, dim: int, stride: int = 1, *, fault: str = "") -> nn.Parameter:
    """This rank's part of a weight, with the attributes that say so."""
    if axis is None:
        return nn.Parameter(full)
    runs = 1 if fault == "stride" else stride
    own = torch.cat([axis.own(each, dim) for each in full.chunk(runs, dim)], dim)
    param: Any = nn.Parameter(own.contiguous())
    param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, dim, stride
    return param


class ColumnParallelLinear(nn.Module):
    """A linear layer of which each rank computes a part of the output."""

    def __init__(self, inputs: int, outputs: int, axis: Axis | None, stride: int = 1, fault: str = "") -> None:
        super().__init__()
        self.axis, self.fault = axis, fault
        full, bias = torch.randn(outputs, inputs) / math.sqrt(inputs), torch.randn(outputs) / 4
        self.weight = divided(full, axis, 0, stride, fault=fault)
        self.bias = divided(bias, axis, 0, stride, fault=fault)

    def forward(self, x: Tensor) -> Tensor:
        if self.axis is not None:
            x = self.axis.gathered(x, 1) if self.axis.over_sequence else self.axis.copied(x)
        return functional.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """A linear layer that takes the output of a `ColumnParallelLinear`."""

    def __init__(self, inputs: int, outputs: int, axis: Axis | None) -> None:
        super().__init__()
        self.axis = axis
        self.weight = divided(torch.randn(outputs, inputs) / math.sqrt(inputs), axis, 1)
        self.bias: Any = nn.Parameter(torch.randn(outputs) / 4)
        self.bias.sequence_parallel = axis is not None and axis.over_sequence

    def forward(self, x: Tensor) -> Tensor:
        x = functional.linear(x, self.weight)
        if self.axis is not None:
            x = self.axis.scattered(x, 1) if self.axis.over_sequence else self.axis.reduced(x)
        return x + self.bias


class VocabParallelEmbedding(nn.Module):
    """An embedding of which each rank has a part of the vocabulary."""

    def __init__(self, axis: Axis | None, fault: str) -> None:
        super().__init__()
        self.axis, self.fault = axis, fault
        self.weight = divided(torch.randn(VOCABULARY, WIDTH), axis, 0)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.axis is None:
            return functional.embedding(tokens, self.weight)
        size = len(self.weight)
        own = tokens - self.axis.rank * size
        mine = (own >= 0) & (own < size)
        x = functional.embedding(own.clamp(0, size - 1), self.weight)
        if self.fault != "vocabulary_mask":  # tokens of another rank add this rank's first or last row
            x = x * mine[..., None]
        return self.axis.scattered(x, 1) if self.axis.over_sequence else self.axis.reduced(x)


class Norm(nn.LayerNorm):
    """A layer norm."""

    def __init__(self, axis: Axis | None) -> None:
        super().__init__(WIDTH)
        for param in self.parameters():
            param.sequence_parallel = axis is not None and axis.over_sequence  # type: ignore[attr-defined]


class Attention(nn.Module):
    """Causal self-attention with one projection of queries, keys and values, heads side by side as Megatron-LM has them."""

    def __init__(self, axis: Axis | None) -> None:
        super().__init__()
        self.linear_qkv, self.linear_proj = (
            ColumnParallelLinear(WIDTH, 3 * WIDTH, axis),
            RowParallelLinear(WIDTH, WIDTH, axis),
        )

    def forward(self, x: Tensor) -> Tensor:
        each = self.linear_qkv(x).unflatten(-1, (-1, 3, WIDTH // HEADS)).transpose(1, 2)
        query, key, value = each.unbind(-2)
        x = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.linear_proj(x.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """A gated MLP; gate and input are one layer whose stride is 2."""

    def __init__(self, axis: Axis | None, fault: str) -> None:
        super().__init__()
        self.linear_fc1 = ColumnParallelLinear(WIDTH, 4 * WIDTH, axis, 2, fault)
        self.linear_fc2 = RowParallelLinear(2 * WIDTH, WIDTH, axis)

    def forward(self, x: Tensor) -> Tensor:
        gate, x = self.linear_fc1(x).chunk(2, -1)
        return self.linear_fc2(functional.silu(gate) * x)


class Block(nn.Module):
    """Attention and an MLP, each on normalised input, dropped out and added to it."""

    def __init__(self, axis: Axis | None, dropout: bool, fault: str) -> None:
        super().__init__()
        self.input_layernorm, self.self_attention = Norm(axis), Attention(axis)
        self.pre_mlp_layernorm, self.mlp = Norm(axis), MLP(axis, fault)
        self.dropout = nn.Dropout(0.1 if dropout else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.self_attention(self.input_layernorm(x)))
        return x + self.dropout(self.mlp(self.pre_mlp_layernorm(x)))


class GPT(nn.Module):
    """Tokens (batch, time) to logits (batch, time, vocabulary), of which each rank of the axis has a part of the vocabulary."""

    def __init__(self, axis: Axis | None, *, dropout: bool, fault: str) -> None:
        super().__init__()
        self.axis, self.fault = axis, fault
        self.embedding = VocabParallelEmbedding(axis, fault)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList(Block(axis, dropout, fault if i == 0 else "") for i in range(LAYERS))
        self.final_layernorm = Norm(axis)
        if fault == "final_norm":
            for param in self.final_layernorm.parameters():
                param.sequence_parallel = False  # type: ignore[attr-defined]
        self.output_layer = ColumnParallelLinear(WIDTH, VOCABULARY, axis)

    def forward(self, tokens: Tensor) -> Tensor:
        position = self.position
        if self.axis is not None and self.axis.over_sequence:
            position = self.axis.own(self.axis.copied(position), 0)
        x = self.embedding(tokens) + position
        for layer in self.layers:
            x = layer(x)
        return self.output_layer(self.final_layernorm(x))

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy over a vocabulary that ranks divide."""
        axis = self.axis
        if axis is None:
            return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        largest = logits.detach().amax(-1)
        if self.fault != "own_max":
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=axis.group)
        logits = logits - largest[..., None]
        size = logits.shape[-1]
        own = targets - axis.rank * size
        mine = (own >= 0) & (own < size)
        chosen = logits.gather(-1, own.clamp(0, size - 1)[..., None])[..., 0] * mine
        return (axis.reduced(logits.exp().sum(-1)).log() - axis.reduced(chosen)).mean()


def sum_sequence_gradients(model: GPT) -> None:
    """Sum the gradients of parameters that each rank has used for its own positions."""
    if model.axis is None or not model.axis.over_sequence:
        return
    for param in model.parameters():
        if getattr(param, "sequence_parallel", False) and param.grad is not None:
            dist.all_reduce(param.grad, group=model.axis.group)
