"""A small training in torch with harmless changes: `python training.py NAME`, under torchrun if the change has several ranks."""

import math
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, LENGTH, VOCABULARY, SAMPLES, STEPS = 48, 4, 16, 64, 12, 6


@dataclass(frozen=True)
class Change:
    """How a run is made. The defaults are those of the run that the golden is made of.

    Attributes:
        threads: of torch, in each process.
        optimizer: "for-loop", "foreach" or "fused".
        attention: the kernel of scaled_dot_product_attention, or "manual".
        sums: what is computed in another order or by another formula; "" for nothing.
        wrapper: "" for a plain model, "ddp", "fsdp1", "fsdp2" or "hsdp".
        world_size: number of ranks.
        packages: a folder of the environment variable CROSSFRAME_OTHER_PACKAGES with other versions, if true.
    """

    threads: int = 1
    optimizer: str = "for-loop"
    attention: str = "flash"
    sums: str = ""
    wrapper: str = ""
    world_size: int = 1
    packages: bool = False


SUMS = (
    "loss_by_sample",
    "loss_in_halves",
    "linear_split",
    "linear_einsum",
    "manual_norm",
    "manual_gelu",
    "one_hot_embedding",
    "manual_cross_entropy",
    "reversed_batch",
    "accumulate_2",
    "accumulate_3",
    "checkpointing",
    "no_mkldnn",
)
KERNELS = ("foreach", "fused")
CHANGES: dict[str, Change] = {
    **{f"threads_{n}": Change(threads=n) for n in (2, 3, 4)},
    **{kernel: Change(optimizer=kernel) for kernel in KERNELS},
    **{f"attention_{kernel}": Change(attention=kernel) for kernel in ("math", "manual")},
    **{name: Change(sums=name) for name in SUMS},
    **{f"{kernel}_threads_2": Change(2, kernel) for kernel in KERNELS},
    **{f"{kernel}_attention_math": Change(1, kernel, "math") for kernel in KERNELS},
    **{f"attention_{kernel}_threads_3": Change(3, attention=kernel) for kernel in ("math", "manual")},
    **{f"fused_{name}": Change(optimizer="fused", sums=name) for name in SUMS[:8]},
    **{f"attention_math_{name}": Change(attention="math", sums=name) for name in SUMS[2:6]},
    **{
        f"{wrapper}_{n}": Change(wrapper=wrapper, world_size=n)
        for wrapper in ("ddp", "fsdp1", "fsdp2")
        for n in (2, 3, 4)
    },
    "hsdp_2x2": Change(wrapper="hsdp", world_size=4),
    "other_numpy": Change(packages=True),
    "other_numpy_foreach": Change(optimizer="foreach", packages=True),
}
"""The harmless changes, by name."""


class Linear(nn.Linear):
    """A linear layer whose sum may have another order."""

    sums = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.sums == "linear_split":
            half = self.in_features // 2
            first = F.linear(x[..., :half], self.weight[:, :half])
            return F.linear(x[..., half:], self.weight[:, half:]) + first + self.bias
        if self.sums == "linear_einsum":
            return torch.einsum("...i,oi->...o", x, self.weight) + self.bias
        return super().forward(x)


class Norm(nn.LayerNorm):
    """A layer norm that may be computed by its formula."""

    sums = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.sums != "manual_norm":
            return super().forward(x)
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.eps) * self.weight + self.bias


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change
        self.norm1, self.norm2 = Norm(WIDTH), Norm(WIDTH)
        self.qkv, self.out = Linear(WIDTH, 3 * WIDTH), Linear(WIDTH, WIDTH)
        self.up, self.down = Linear(WIDTH, 4 * WIDTH), Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self._attention(q, k, v).transpose(1, 2).flatten(2))
        h = self.up(self.norm2(x))
        if self.change.sums == "manual_gelu":
            h = 0.5 * h * (1 + torch.erf(h / math.sqrt(2)))
        else:
            h = F.gelu(h)
        return x + self.down(h)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.change.attention == "manual":
            scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
            hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
            return torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v
        backend = SDPBackend.MATH if self.change.attention == "math" else SDPBackend.FLASH_ATTENTION
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Model(nn.Module):
    """A small GPT."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(change) for _ in range(2))
        self.norm, self.head = Norm(WIDTH), Linear(WIDTH, VOCABULARY)
        for module in self.modules():
            if isinstance(module, Linear | Norm):
                module.sums = change.sums

    def forward(self, tokens: Tensor) -> Tensor:
        if self.change.sums == "one_hot_embedding":
            x = F.one_hot(tokens, VOCABULARY).float() @ self.tokens.weight
        else:
            x = self.tokens(tokens)
        x = x + self.positions(torch.arange(LENGTH))
        for block in self.blocks:
            if self.change.sums == "checkpointing":
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(self.norm(x))


def loss_of(logits: Tensor, targets: Tensor, sums: str) -> Tensor:
    """The mean cross entropy."""
    each = partial(F.cross_entropy)
    if sums == "loss_by_sample":
        return torch.stack([each(a, b) for a, b in zip(logits, targets, strict=True)]).sum() / len(logits)
    if sums == "loss_in_halves":
        halves = zip(logits.chunk(2), targets.chunk(2), strict=True)
        return sum(each(a.flatten(0, 1), b.flatten()) for a, b in halves) / 2  # type: ignore[return-value]
    if sums == "manual_cross_entropy":
        chosen = logits.gather(-1, targets[..., None]).squeeze(-1)
        return (torch.logsumexp(logits, -1) - chosen).mean()
    return each(logits.flatten(0, 1), targets.flatten())


def wrapped(model: nn.Module, change: Change) -> nn.Module:
    """The model, sharded or replicated as the change states."""
    if change.wrapper == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if change.wrapper == "fsdp1":
        from torch_backend.fully_sharded_data_parallel import FullyShardedDataParallel
        from torch_backend.wrap import ModuleWrapPolicy

        return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
    if change.wrapper in ("fsdp2", "hsdp"):
        from torch.distributed.device_mesh import init_device_mesh

        from torch_backend.fully_shard import fully_shard

        shape, names = (
            ((2, 2), ("replicate", "shard")) if change.wrapper == "hsdp" else ((change.world_size,), ("shard",))
        )
        options: dict[str, Any] = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=names)}
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, **options)
        fully_shard(model, **options)
    return model


def train(change: Change) -> None:
    """Train with a change."""
    torch.set_num_threads(change.threads)
    torch.backends.mkldnn.enabled = change.sums != "no_mkldnn"  # type: ignore[assignment]
    rank = dist.get_rank() if change.world_size > 1 else 0
    torch.manual_seed(0)
    model = wrapped(Model(change), change)
    foreach, fused = change.optimizer == "foreach", change.optimizer == "fused"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=foreach, fused=fused)
    parts = int(change.sums[-1]) if change.sums.startswith("accumulate") else 1
    for step in range(STEPS):
        tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(step))
        own = tokens.chunk(change.world_size)[rank]
        own = own.flip(0) if change.sums == "reversed_batch" else own
        for part in own.chunk(parts):
            loss = loss_of(model(part[:, :-1]), part[:, 1:], change.sums) / parts
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    """Train with the change that the command line names; "" is none."""
    change = CHANGES[sys.argv[1]] if sys.argv[1:] else Change()
    if change.world_size > 1:
        dist.init_process_group("gloo")
    train(change)


if __name__ == "__main__":
    main()
