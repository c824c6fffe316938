"""A transformer, dense or with mixtures of experts, whose layers are divided over an axis by hand or by `parallelize_module`.

Modules take the name of a fault, and the lines that it changes are here. On one device all of them are plain layers.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

from experiments.parallelism.axis import Axis, local

WIDTH, HEADS, VOCABULARY, LENGTH, LAYERS = 16, 4, 32, 8, 2
EXPERTS, CHOSEN, EXPERT_WIDTH = 4, 2, 24


def divide(module: nn.Module, name: str, axis: Axis, dim: int) -> None:
    """Divide a parameter over the axis along a dim."""
    full = getattr(module, name).detach()
    setattr(module, name, nn.Parameter(distribute_tensor(full, axis.mesh, [Shard(dim)])))


class Column(nn.Linear):
    """A linear layer of which each rank of the axis computes a part of the output."""

    axis: Axis | None = None
    fault = ""

    def divided(self, axis: Axis) -> None:
        self.axis = axis
        divide(self, "weight", axis, 0)
        divide(self, "bias", axis, 0)

    def forward(self, x: Tensor) -> Tensor:
        if self.axis is None:
            return super().forward(x)
        if self.axis.over_sequence:
            x = self.axis.gathered(x, 1)
        elif self.fault != "column_gradient":
            x = self.axis.copied(x)
        return functional.linear(x, local(self.weight), local(self.bias))


class Row(nn.Linear):
    """A linear layer that takes what a `Column` gives; the ranks' results are summed."""

    axis: Axis | None = None
    fault = ""

    def divided(self, axis: Axis) -> None:
        self.axis = axis
        divide(self, "weight", axis, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.axis is None:
            return super().forward(x)
        if self.fault == "row_bias":
            return self.axis.reduced(functional.linear(x, local(self.weight), self.bias))
        x = functional.linear(x, local(self.weight))
        if self.axis.over_sequence:
            return self.axis.scattered(x, 1) + self.axis.copied(self.bias)
        if self.fault == "row_not_reduced":
            return x + self.bias
        if self.fault == "row_average":
            x = x / self.axis.size
        return self.axis.reduced(x) + self.bias


class Norm(nn.LayerNorm):
    """A layer norm, under sequence parallelism of this rank's positions."""

    axis: Axis | None = None
    fault = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.axis is None or not self.axis.over_sequence or self.fault == "norm_gradients":
            return super().forward(x)
        weight, bias = (self.axis.copied(each) for each in (self.weight, self.bias))
        return functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class Embedding(nn.Embedding):
    """An embedding, under sequence parallelism of this rank's positions."""

    axis: Axis | None = None
    fault = ""

    def forward(self, tokens: Tensor) -> Tensor:
        if self.axis is None or not self.axis.over_sequence or self.fault == "embedding_gradient":
            return super().forward(tokens)
        return functional.embedding(tokens, self.axis.copied(self.weight))


class Dropout(nn.Module):
    """Drops a tenth, by masks that follow from the layer and the number of the call."""

    axis: Axis | None = None
    fault = ""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.calls = layer, 0

    def forward(self, x: Tensor) -> Tensor:
        seed = 1000 * self.calls + self.layer
        if self.fault == "dropout_seed" and self.axis is not None:
            seed += 100 * self.axis.rank
        self.calls += 1
        generator = torch.Generator().manual_seed(seed)
        return x * (torch.rand(x.shape, generator=generator, dtype=torch.float64) > 0.1) / 0.9


class Attention(nn.Module):
    """Causal self-attention; an axis divides the heads."""

    axis: Axis | None = None
    fault = ""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (Column(WIDTH, WIDTH) for _ in range(3))
        self.out = Row(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        per_head = WIDTH // (query.shape[1] if self.fault == "head_width" else HEADS)
        scores = query @ key.transpose(-1, -2) / math.sqrt(per_head)
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
        return self.out((weights @ value).transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """Two linear layers around a GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Column(WIDTH, 2 * WIDTH), Row(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Experts(nn.Module):
    """Experts, of which each rank of the axis has some.

    Attributes:
        shares_batch: all ranks of the axis have the same samples; otherwise each has its own, and they are gathered.
    """

    axis: Axis | None = None
    fault = ""
    shares_batch = True

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, EXPERT_WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, EXPERT_WIDTH, WIDTH) / 4)

    def divided(self, axis: Axis, *, shares_batch: bool) -> None:
        self.axis, self.shares_batch = axis, shares_batch
        divide(self, "up", axis, 0)
        divide(self, "down", axis, 0)

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        axis = self.axis
        if axis is None:
            return self.of(x, gates, self.up, self.down)
        count = EXPERTS // axis.size
        first = 0 if self.fault == "expert_offset" else axis.rank * count
        if self.shares_batch:
            gates = gates if self.fault == "router_gradient" else axis.copied(gates)
            parts = axis.copied(x), gates[..., first : first + count]
            return axis.reduced(self.of(*parts, local(self.up), local(self.down)))
        x = axis.all_gather(x, 0) if self.fault == "gather_gradient" else axis.gathered(x, 0)
        parts = x, axis.gathered(gates, 0)[..., first : first + count]
        return axis.scattered(self.of(*parts, local(self.up), local(self.down)), 0)

    @staticmethod
    def of(x: Tensor, gates: Tensor, up: Tensor, down: Tensor) -> Tensor:
        hidden = functional.silu(torch.einsum("btw,ewh->bteh", x, up))
        return torch.einsum("bteh,ehw,bte->btw", hidden, down, gates)


class Mixture(nn.Module):
    """The weighted sum of the chosen experts. All experts compute; a weight of 0 leaves one out."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts()

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        chosen = gates.topk(CHOSEN, -1).indices
        gates = gates * torch.zeros_like(gates).scatter(-1, chosen, 1.0)
        return self.experts(x, gates / gates.sum(-1, keepdim=True))


class Block(nn.Module):
    """Attention, and an MLP or a mixture of experts, each on normalised input and added to it."""

    def __init__(self, layer: int, *, experts: bool, dropout: bool) -> None:
        super().__init__()
        self.attention_norm, self.attention = Norm(WIDTH), Attention()
        self.mlp_norm, self.mlp = Norm(WIDTH), Mixture() if experts else MLP()
        self.dropout = Dropout(layer) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Transformer(nn.Module):
    """Tokens (batch, time) to logits (batch, time, vocabulary); as a stage of a pipeline, a part of that."""

    axis: Axis | None = None
    fault = ""

    def __init__(self, *, experts: bool, dropout: bool) -> None:
        super().__init__()
        self.embed: Any = Embedding(VOCABULARY, WIDTH)
        self.positions: Any = Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block(i, experts=experts, dropout=dropout) for i in range(LAYERS))
        self.norm: Any = Norm(WIDTH)
        self.head: Any = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def keep_stage(self, stage: int) -> None:
        """Keep the layers of the first or the second half."""
        half = LAYERS // 2
        if stage == 0:
            self.norm = self.head = None
            del self.layers[half:]
            return
        self.embed = self.positions = None
        for i in range(half):
            if self.fault == "stage_layers":  # the checkpoint's layers are counted from the first of the stage
                self.layers[half + i].load_state_dict(self.layers[i].state_dict())
            self.layers[i] = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        sequence = self.axis if self.axis is not None and self.axis.over_sequence else None
        if self.embed is not None:
            positions = torch.arange(LENGTH)
            if sequence is not None:
                x, positions = sequence.own(x, 1), sequence.own(positions, 0)
                if self.fault == "position_offset":
                    positions = torch.arange(len(positions))
            x = self.embed(x) + self.positions(positions)
        for layer in self.layers:
            x = layer(x)
        if self.head is None:
            return x
        x = self.norm(x)
        if sequence is not None:
            first = (lambda grad: grad.chunk(sequence.size, 1)[0]) if self.fault == "sequence_chunk" else None
            x = sequence.joined(x, 1, first)
        return self.head(x)


def divide_by_hand(model: Transformer, axis: Axis, fault: str) -> None:
    """Divide the layers of all blocks, and leave the embedding, the norms, the router and the head whole on each rank."""
    for module in model.modules():
        if isinstance(module, Column | Row):
            module.divided(axis)
        elif isinstance(module, Experts):
            module.divided(axis, shares_batch=True)
        elif isinstance(module, Norm | Embedding | Dropout | Transformer):
            module.axis = axis
    set_fault(model, fault)


def set_fault(model: Any, fault: str) -> None:
    """Tell modules of a fault: layers of one block, or all of a class."""
    last = model.layers[-1]
    of_one = {
        "column_gradient": lambda: last.mlp.up,
        "row_not_reduced": lambda: model.layers[0].mlp.down,
        "row_bias": lambda: model.layers[0].mlp.down,
        "row_average": lambda: last.attention.out,
        "embedding_gradient": lambda: model.embed,
    }
    chosen = [of_one[fault]()] if fault in of_one else model.modules()
    for module in chosen:
        if hasattr(module, "fault"):
            module.fault = fault
