"""transformers' Llama layers with tensor, sequence, context and expert parallelism, and parts of the model for pipelines.

The lines that a fault changes are here and in `training.py`.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from transformers import LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from experiments.parallelism.axis import Axis

WIDTH, HEADS, VOCABULARY, LENGTH, LAYERS = 16, 4, 32, 8, 4
EXPERTS, CHOSEN, EXPERT_WIDTH = 4, 2, 24


def positions_of(axis: Axis | None, order: str) -> Tensor:
    """The positions that this rank computes: a part of the sequence, or the i-th of 2n parts from both ends ("head_tail")."""
    whole = torch.arange(LENGTH)
    if axis is None:
        return whole
    if order == "head_tail":
        parts = whole.chunk(2 * axis.size)
        return torch.cat([parts[axis.rank], parts[-1 - axis.rank]])
    return whole.chunk(axis.size)[axis.rank]


class Context:
    """The positions of this rank and of all ranks of a context-parallel axis, which attention reads."""

    def __init__(self, axis: Axis | None = None, order: str = "rank", fault: str = "") -> None:
        self.axis, self.fault = axis, fault
        self.own = positions_of(axis, order)
        self.all = self.own if axis is None else axis.all_gather(self.own, 0)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Causal attention of this rank's queries over the keys of all positions."""
        if self.axis is not None:
            key, value = self.axis.gathered(key, 2), self.axis.gathered(value, 2)
        visible = self.own[:, None] >= self.all
        if (
            self.fault == "context_mask" and self.axis is not None
        ):  # as if gathered keys were those of the first positions
            visible = torch.ones(visible.shape, dtype=torch.bool).tril()
        scores = (query @ key.transpose(-1, -2) * scaling).masked_fill(~visible, -math.inf)
        return scores.softmax(-1) @ value


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
    key, value = (each.repeat_interleave(module.num_key_value_groups, 1) for each in (key, value))
    return module.context.attention(query, key, value, scaling).transpose(1, 2), None


class _Dispatch(torch.autograd.Function):
    """Sends rows to the ranks of a group; the gradient goes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.sizes, ctx.group = (received, sent), group
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _Dispatch.apply(grads[0], *ctx.sizes, ctx.group), None, None, None  # type: ignore[return-value]


class Experts(nn.Module):
    """Rows, sorted by expert, through the experts of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, EXPERT_WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, EXPERT_WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        up, down = (each.to_local() if isinstance(each, DTensor) else each for each in (self.up, self.down))
        parts = x.split(counts)
        return torch.cat([functional.silu(part @ up[i]) @ down[i] for i, part in enumerate(parts)])


class Mixture(nn.Module):
    """The weighted sum of each token's chosen experts. Tokens are sent to the ranks of an axis that have these experts."""

    axis: Axis | None = None
    fault = ""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts()

    def divided(self, axis: Axis) -> None:
        self.axis = axis
        for name in ("up", "down"):
            full = getattr(self.experts, name).detach()
            setattr(self.experts, name, nn.Parameter(distribute_tensor(full, axis.mesh, [Shard(0)])))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        gates, chosen = self.router(rows).softmax(-1).topk(CHOSEN, -1)
        gates = gates / gates.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        sent = rows[order // CHOSEN]
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        out = torch.empty_like(sent).index_copy(0, order, self._computed(sent, counts))
        return (out.unflatten(0, (-1, CHOSEN)) * gates[..., None]).sum(1).view_as(x)

    def _computed(self, rows: Tensor, counts: Tensor) -> Tensor:
        axis = self.axis
        if axis is None:
            return self.experts(rows, counts.tolist())
        of_ranks = axis.all_gather(counts[None], 0).unflatten(1, (axis.size, -1))  # (sender, receiver, expert)
        mine = of_ranks[:, axis.rank]
        sent, received = counts.unflatten(0, (axis.size, -1)).sum(1).tolist(), mine.sum(1).tolist()
        rows = _Dispatch.apply(rows, sent, received, axis.group)  # type: ignore[assignment]
        experts = torch.arange(mine.shape[1]).repeat(axis.size).repeat_interleave(mine.flatten())
        order = experts.argsort(stable=True)
        done = self.experts(rows[order], mine.sum(0).tolist())
        if self.fault != "dispatch_order":  # rows go back in the order in which experts computed them
            done = torch.empty_like(done).index_copy(0, order, done)
        return _Dispatch.apply(done, received, sent, axis.group)  # type: ignore[return-value]


class Decoder(nn.Module):
    """Tokens (batch, time) to logits (batch, time, vocabulary); as a stage of a pipeline, a part of that."""

    def __init__(self, *, experts: bool, tied: bool = False, part: tuple[int, int] = (0, 1)) -> None:
        super().__init__()
        config = LlamaConfig(
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS // 2,
            vocab_size=VOCABULARY,
            num_hidden_layers=LAYERS,
            max_position_embeddings=LENGTH,
        )
        config._attn_implementation = "of_positions"
        self.embed_tokens: Any = nn.Embedding(VOCABULARY, WIDTH)
        self.rotary: Any = LlamaRotaryEmbedding(config)
        self.layers = nn.ModuleDict({str(i): LlamaDecoderLayer(config, i) for i in range(LAYERS)})
        for layer in self.layers.values():
            layer.input_layernorm, layer.post_attention_layernorm = nn.RMSNorm(WIDTH, 1e-6), nn.RMSNorm(WIDTH, 1e-6)  # type: ignore[assignment]
            if experts:
                layer.mlp = Mixture()  # type: ignore[assignment]
        self.norm: Any = nn.RMSNorm(WIDTH, 1e-6)
        self.lm_head: Any = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight
        self.shift = 0
        self._keep(*part)
        self.see(Context())

    def _keep(self, stage: int, stages: int) -> None:
        """Keep the layers of a stage, with the embedding on the first and the head on the last one."""
        first, last = LAYERS * stage // stages, LAYERS * (stage + 1) // stages
        for i in range(LAYERS):
            if not first <= i < last:
                del self.layers[str(i)]
        if stage > 0:
            self.embed_tokens = None
        if stage < stages - 1:
            self.norm = self.lm_head = None

    def see(self, context: Context) -> None:
        """Compute the positions of a context."""
        self.context = context
        for layer in self.layers.values():
            layer.self_attn.context = context  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        positions = self.context.own
        if self.context.fault == "context_positions" and self.context.axis is not None:
            positions = positions_of(self.context.axis, "rank")
        embeddings = self.rotary(x, positions[None])
        for layer in self.layers.values():
            x = layer(x, position_embeddings=embeddings)
        return x if self.lm_head is None else self.lm_head(self.norm(x))


ALL_ATTENTION_FUNCTIONS.register("of_positions", _attention)


class _Chunk(torch.autograd.Function):
    """The part of a sequence that a rank has; the gradient of the other parts is zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, rank: int) -> Tensor:
        ctx.size, ctx.rank = size, rank
        return x.chunk(size, 1)[rank].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        parts = [grads[0] if i == ctx.rank else torch.zeros_like(grads[0]) for i in range(ctx.size)]
        return torch.cat(parts, 1), None, None


class RowWithoutGather(RowwiseParallel):
    """A row-parallel layer over divided positions whose backward does not gather the gradient of the other positions."""

    @staticmethod
    def _prepare_output_fn(output_layouts: Any, use_local_output: Any, mod: Any, outputs: Any, device_mesh: Any) -> Any:
        whole = outputs.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])
        return _Chunk.apply(whole, device_mesh.size(), device_mesh.get_local_rank())


class UnreducedNorm(SequenceParallel):
    """A norm over divided positions whose weight is replicated without a sum of its gradients."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module


def divide_layers(model: Decoder, mesh: DeviceMesh, *, sequence: bool, fault: str) -> None:
    """Divide layers, and under sequence parallelism the vocabulary, by `parallelize_module`.

    The logits are then divided over the vocabulary, and `loss_parallel` computes the loss.
    """
    column, row = ColwiseParallel, RowwiseParallel
    attention: dict[str, Any] = {f"self_attn.{name}_proj": column() for name in "qkv"}
    plan = attention | {
        "self_attn.o_proj": row(),
        "mlp.gate_proj": column(),
        "mlp.up_proj": column(),
        "mlp.down_proj": row(),
    }
    if sequence:
        whole, part = Replicate(), Shard(1)
        plan |= {
            "input_layernorm": SequenceParallel(),
            "post_attention_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": part},
                desired_input_kwarg_layouts={"hidden_states": whole},
                use_local_output=True,
            ),
            "mlp": PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(whole,), use_local_output=True),
            "self_attn.o_proj": row(output_layouts=part),
            "mlp.down_proj": row(output_layouts=part),
        }
        ends: dict[str, Any] = {
            "embed_tokens": row(input_layouts=whole, output_layouts=part),
            "norm": SequenceParallel(),
            "lm_head": column(input_layouts=part, output_layouts=Shard(-1), use_local_output=False),
        }
        parallelize_module(model, mesh, ends)
    for name, layer in model.layers.items():
        wrong = dict(plan)
        if name == str(LAYERS - 1) and fault == "row_backward":
            wrong["mlp.down_proj"] = RowWithoutGather(output_layouts=Shard(1))
        if name == "1" and fault == "norm_weight":
            wrong["post_attention_layernorm"] = UnreducedNorm()
        parallelize_module(layer, mesh, wrong)  # type: ignore[arg-type]
