"""Trains a small GPT in one file, in the style of nanoGPT: microbatches, GradScaler, a cosine schedule, checkpoints.

torchrun --nproc-per-node 2 train.py [--parallel crossframe] [--dtype float16] [--microbatches 4] [--compile] [--mistake]
"""

import argparse
import math
import os
import tempfile
from contextlib import nullcontext

import numpy as np
import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--parallel", choices=["ddp", "torch", "crossframe", "none"], default="ddp")
parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
parser.add_argument("--microbatches", type=int, default=4, help="Of all ranks together.")
parser.add_argument("--compile", action="store_true")
parser.add_argument(
    "--mistake", action="store_true", help="Clip gradients that are still multiplied by the loss scale."
)
args = parser.parse_args()

if args.parallel == "crossframe":
    from torch_backend import fully_shard
else:
    from torch.distributed.fsdp import fully_shard

batch_size, block_size, vocab_size = 4, 32, 65
n_layer, n_head, n_embd = 3, 4, 32
learning_rate, min_lr, warmup_iters, lr_decay_iters, max_iters = 1e-2, 1e-3, 2, 6, 6
weight_decay, beta1, beta2, grad_clip = 1e-1, 0.9, 0.95, 0.5
eval_interval, eval_iters = 3, 2


class CausalSelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, length, width = x.shape
        q, k, v = (
            part.view(size, length, n_head, width // n_head).transpose(1, 2) for part in self.c_attn(x).split(width, 2)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(size, length, width))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc = nn.Linear(n_embd, 4 * n_embd, bias=False)
        self.c_proj = nn.Linear(4 * n_embd, n_embd, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(functional.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(n_embd, bias=False), CausalSelfAttention()
        self.ln_2, self.mlp = nn.LayerNorm(n_embd, bias=False), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Its output layer and its embedding share a weight. Returns logits and, with targets, the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab_size, n_embd),
                "wpe": nn.Embedding(block_size, n_embd),
                "h": nn.ModuleList(Block() for _ in range(n_layer)),
                "ln_f": nn.LayerNorm(n_embd, bias=False),
            }
        )
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight
        for name, param in self.named_parameters():
            if param.dim() > 1:
                std = 0.02 / math.sqrt(2 * n_layer) if name.endswith("c_proj.weight") else 0.02
                nn.init.normal_(param, mean=0.0, std=std)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> tuple:
        pos = torch.arange(idx.shape[1], device=idx.device)
        x = self.transformer["wte"](idx) + self.transformer["wpe"](pos)
        for block in self.transformer["h"]:
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        if targets is None:
            return logits, None
        return logits, functional.cross_entropy(logits.view(-1, vocab_size), targets.view(-1), ignore_index=-1)


def configure_optimizers(model: nn.Module) -> torch.optim.Optimizer:
    """Weights decay, gains of norms do not."""
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in params if param.dim() >= 2], "weight_decay": weight_decay},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2))


def get_lr(it: int) -> float:
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * min(ratio, 1.0))) * (learning_rate - min_lr)


def prepare(folder: str) -> None:
    """Random text, in which a token depends on the one before it."""
    random = np.random.default_rng(1)
    steps = random.integers(0, 8, size=4096).cumsum() % vocab_size
    steps.astype(np.uint16).tofile(os.path.join(folder, "train.bin"))


def get_batch(folder: str, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The microbatch of a number, which is the same on any number of ranks."""
    data = np.memmap(os.path.join(folder, "train.bin"), dtype=np.uint16, mode="r")
    generator = torch.Generator().manual_seed(1337 + number)
    ix = torch.randint(len(data) - block_size, (batch_size,), generator=generator)
    rows = torch.stack([torch.from_numpy(data[i : i + block_size + 1].astype(np.int64)) for i in ix])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def main() -> None:
    distributed = args.parallel != "none"
    rank, world = (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if distributed else (0, 1)
    if distributed:
        init_process_group(backend="gloo")
    assert args.microbatches % world == 0
    gradient_accumulation_steps = args.microbatches // world
    folder = tempfile.mkdtemp()
    prepare(folder)
    torch.manual_seed(1337)
    ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[args.dtype]
    ctx = nullcontext() if args.dtype == "float32" else torch.amp.autocast(device_type="cpu", dtype=ptdtype)
    model = raw_model = GPT()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=args.dtype == "float16")
    if args.parallel in ("torch", "crossframe"):
        for block in model.transformer["h"]:
            fully_shard(block)
        fully_shard(model)
    optimizer = configure_optimizers(model)
    if args.compile:
        model = torch.compile(model)
    if args.parallel == "ddp":
        model = DistributedDataParallel(model)

    @torch.no_grad()
    def estimate_loss() -> float:
        model.eval()
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            with ctx:
                _, loss = model(*get_batch(folder, 10_000 + k))
            losses[k] = loss.item()
        model.train()
        return losses.mean().item()

    for it in range(max_iters):
        lr = get_lr(it)
        for group in optimizer.param_groups:
            group["lr"] = lr
        if it % eval_interval == 0:
            estimated = estimate_loss()
            if rank == 0:
                print(f"step {it}: val loss {estimated:.4f}")
                if args.parallel in ("ddp", "none"):
                    checkpoint = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": it}
                    torch.save(checkpoint, os.path.join(folder, "ckpt.pt"))
        for micro_step in range(gradient_accumulation_steps):
            last = micro_step == gradient_accumulation_steps - 1
            if args.parallel == "ddp":
                model.require_backward_grad_sync = last
            elif distributed:
                raw_model.set_requires_gradient_sync(last)
            x, y = get_batch(folder, (it * gradient_accumulation_steps + micro_step) * world + rank)
            with ctx:
                _, loss = model(x, y)
                loss = loss / gradient_accumulation_steps
            scaler.scale(loss).backward()
        if not args.mistake:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if rank == 0:
            print(f"iter {it}: loss {loss.item() * gradient_accumulation_steps:.4f}, lr {lr:.2e}")
    if distributed:
        destroy_process_group()


if __name__ == "__main__":
    main()
