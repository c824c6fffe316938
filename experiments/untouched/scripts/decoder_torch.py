"""Train a small decoder in plain torch; `decoder_nnx.py` is the same model in flax.

Both begin with the same values, which numpy draws by name and seed, and see the same batches.
"""

import argparse
import math
import os
import zlib
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

CLEAN = {
    "base": "matrix products for attention, one rank or DDP",
    "sdpa": "attention by scaled_dot_product_attention",
    "fused": "fused AdamW",
    "foreach": "foreach AdamW",
    "joined": "gate and up projections as one product of joined weights",
    "torch_norm": "torch's rms_norm instead of one by hand",
    "ours": "sharded by torch_backend.fully_shard",
    "fsdp2": "sharded by torch's fully_shard",
    "fsdp1": "sharded by torch's FullyShardedDataParallel",
    "accumulate": "two microbatches a step",
    "accumulate_reversed": "the same two in the opposite order",
    "complex_rotary": "rotary positions as products of complex numbers",
}
FAULTS = {
    "gate_and_up": "the activation is applied to the up projection instead of the gate",
    "rotary_keys": "keys of layer 1 are not turned by their positions",
    "norm_outside": "the norm divides by the root of the mean square plus epsilon, epsilon outside of the root and 1e-2",
}
VOCABULARY, WIDTH, HEADS, MLP, LAYERS, CONTEXT = 68, 32, 4, 64, 3, 18
EPSILON = 1e-5


def initial(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """The value with which a parameter begins, in float32."""
    if "norm" in name:
        return np.ones(shape, np.float32)
    draw = np.random.default_rng((zlib.crc32(name.encode()), seed))
    return (draw.standard_normal(shape) / math.sqrt(shape[-1])).astype(np.float32)


def tokens_of(step: int, seed: int) -> np.ndarray:
    """(6, CONTEXT + 1): each token is a fixed function of the two before it, with noise."""
    draw = np.random.default_rng((seed, step, 271828))
    tokens = draw.integers(0, VOCABULARY, (6, CONTEXT + 1))
    for i in range(2, CONTEXT + 1):
        follows = (3 * tokens[:, i - 1] + tokens[:, i - 2]) % VOCABULARY
        tokens[:, i] = np.where(draw.random(6) < 0.8, follows, tokens[:, i])
    return tokens


class Norm(nn.Module):
    def __init__(self, on: set[str]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))
        self.by_torch, self.outside = "torch_norm" in on, "norm_outside" in on

    def forward(self, x: Tensor) -> Tensor:
        if self.by_torch:
            return F.rms_norm(x, (WIDTH,), self.weight, EPSILON)
        if self.outside:
            return x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-2) * self.weight
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * self.weight


def angles(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines (CONTEXT, head width / 2) of rotary positions."""
    width = WIDTH // HEADS
    rates = 10000.0 ** (-np.arange(0, width, 2) / width)
    turned = np.arange(CONTEXT)[:, None] * rates
    return tuple(torch.from_numpy(each(turned)).to(dtype) for each in (np.cos, np.sin))  # type: ignore[return-value]


def turn(x: Tensor, on: set[str]) -> Tensor:
    """Rotary positions on (batch, head, time, width), whose pairs are its halves."""
    cos, sin = angles(x.dtype)
    first, second = x.chunk(2, -1)
    if "complex_rotary" in on and x.dtype in (torch.float32, torch.float64):
        found = torch.complex(first, second) * torch.complex(cos, sin)
        return torch.cat([found.real, found.imag], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Attention(nn.Module):
    def __init__(self, on: set[str], layer: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.on, self.layer = on, layer

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        query = turn(query, self.on)
        if not ("rotary_keys" in self.on and self.layer == 1):
            key = turn(key, self.on)
        if "sdpa" in self.on:
            found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
            hidden = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1)
            found = scores.masked_fill(hidden, -math.inf).softmax(-1) @ value
        return self.out(found.transpose(1, 2).flatten(-2))


class Feedforward(nn.Module):
    def __init__(self, on: set[str]) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, MLP, bias=False), nn.Linear(WIDTH, MLP, bias=False)
        self.down = nn.Linear(MLP, WIDTH, bias=False)
        self.on = on

    def forward(self, x: Tensor) -> Tensor:
        if "joined" in self.on:
            gate, up = F.linear(x, torch.cat([self.gate.weight, self.up.weight])).chunk(2, -1)
        else:
            gate, up = self.gate(x), self.up(x)
        if "gate_and_up" in self.on:
            gate, up = up, gate
        return self.down(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, on: set[str], layer: int) -> None:
        super().__init__()
        self.norm1, self.attention = Norm(on), Attention(on, layer)
        self.norm2, self.mlp = Norm(on), Feedforward(on)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """Tokens (batch, CONTEXT) to logits (batch, CONTEXT, VOCABULARY)."""

    def __init__(self, on: set[str]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(on, i) for i in range(LAYERS))
        self.norm = Norm(on)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def wrap(model: Decoder, on: set[str]) -> nn.Module:
    """The model as the variant trains it on several ranks."""
    if "fsdp1" in on:
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        policy = ModuleWrapPolicy({Layer})
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )
    if on & {"fsdp2", "ours"}:
        if "fsdp2" in on:
            from torch.distributed.fsdp import fully_shard
        else:
            from torch_backend import fully_shard

        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        return model
    return nn.parallel.DistributedDataParallel(model)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", default="base", help="names joined by +")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    on = set(options.variant.split("+"))
    assert on <= CLEAN.keys() | FAULTS.keys(), on
    torch.set_num_threads(1)
    is_distributed = "RANK" in os.environ
    if is_distributed:
        dist.init_process_group("gloo")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if is_distributed else (0, 1)
    dtype = getattr(torch, options.dtype)
    decoder = Decoder(on)
    with torch.no_grad():
        for name, param in decoder.named_parameters():
            param.copy_(torch.from_numpy(initial(name, tuple(param.shape), options.seed)))
    model: nn.Module = decoder.to(dtype)
    if is_distributed:
        model = wrap(decoder, on)
    fused = True if "fused" in on else None
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.1, fused=fused, foreach="foreach" in on)
    for step in range(options.steps):
        rows = np.array_split(tokens_of(step, options.seed), world_size)[rank]
        parts = [rows]
        if on & {"accumulate", "accumulate_reversed"}:
            cut = len(rows) // 3
            parts = [rows[:cut], rows[cut:]]
            if "accumulate_reversed" in on:
                parts.reverse()
        total = 0.0
        for i, part in enumerate(parts):
            is_last = i == len(parts) - 1
            quiet = nullcontext()
            if is_distributed and on & {"fsdp2", "ours"}:
                model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
            elif is_distributed and not is_last:
                quiet = model.no_sync()  # type: ignore[operator]
            tokens = torch.from_numpy(part)
            with quiet:
                logits = model(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) * (len(part) / len(rows))
                loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {total:.12f}", flush=True)
    del model  # DDP's destructor must not be the last owner of gloo's threads: it joins them while it holds the GIL
    if is_distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
