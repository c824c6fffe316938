"""Trains a language model with tied embeddings: DDP, accumulation, autocast, clipping, warm-up, compilation, and a resumed run.

torchrun --nproc-per-node 2 train.py [--batch 2 --accumulate 2] [--bf16] [--compile] [--adamw fused] [--resume-at 3] [--mistake]

The batch of all ranks has 8 samples. With --mistake no_sync holds for the last microbatch instead of all others. DDP reduces
only the gradients of the first ones, and each rank adds its own gradients of the last one.
"""

import argparse
import copy
import io
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from data import Walks, loader
from model import LanguageModel
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=4, help="Samples of a rank and microbatch.")
parser.add_argument("--accumulate", type=int, default=1, help="Microbatches of a step.")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--bf16", action="store_true", help="Autocast to bfloat16.")
parser.add_argument("--compile", action="store_true", help="torch.compile.")
parser.add_argument("--adamw", choices=["foreach", "fused", "loop"], default="foreach")
parser.add_argument("--zeros", action="store_true", help="Zero gradients in place instead of setting them to None.")
parser.add_argument("--workers", type=int, default=0, help="Processes of the data loader.")
parser.add_argument("--own-smoothing", action="store_true", help="Write the loss with smoothed labels out.")
parser.add_argument("--resume-at", type=int, default=0, help="Save before this step, and go on with new objects.")
parser.add_argument("--mistake", action="store_true", help="no_sync for the last microbatch.")
args = parser.parse_args()

VOCABULARY, LENGTH, SMOOTHING = 64, 16, 0.1


def build() -> tuple[LanguageModel, torch.optim.Optimizer, LambdaLR]:
    torch.manual_seed(0)
    model = LanguageModel(VOCABULARY, LENGTH, width=32, heads=4, depth=2)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    how = {"fused": True} if args.adamw == "fused" else {"foreach": args.adamw == "foreach"}
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), **how)
    return model, optimizer, LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))


def wrap(model: LanguageModel, ranks: int) -> torch.nn.Module:
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    return torch.compile(wrapped) if args.compile else wrapped


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits, targets = logits.float().flatten(0, 1), targets.flatten()
    if not args.own_smoothing:
        return functional.cross_entropy(logits, targets, label_smoothing=SMOOTHING)
    log_probs = logits.log_softmax(-1)
    hard = -log_probs.gather(1, targets[:, None]).squeeze(1)
    return ((1 - SMOOTHING) * hard - SMOOTHING * log_probs.mean(1)).mean()


def resumed(model, optimizer, scheduler):
    file = io.BytesIO()
    saved = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    torch.save({name: x.state_dict() for name, x in saved.items()}, file)
    file.seek(0)
    checkpoint = torch.load(file, weights_only=True)
    for name, x in zip(saved, new := build(), strict=True):
        x.load_state_dict(copy.deepcopy(checkpoint[name]))
    return new


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), int(os.environ["WORLD_SIZE"])
    model, optimizer, scheduler = build()
    wrapped = wrap(model, ranks)
    samples = args.steps * args.batch * args.accumulate * ranks
    batches = iter(loader(Walks(samples, LENGTH, VOCABULARY, seed=1), args.batch, rank, ranks, args.workers))
    for step in range(args.steps):
        if args.resume_at and step == args.resume_at:
            model, optimizer, scheduler = resumed(model, optimizer, scheduler)
            wrapped = wrap(model, ranks)
        wrapped.train()
        optimizer.zero_grad(set_to_none=not args.zeros)
        total = 0.0
        for micro in range(args.accumulate):
            x, y = next(batches)
            last = micro == args.accumulate - 1
            reduces = last != args.mistake
            with nullcontext() if ranks == 1 or reduces else wrapped.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
                    logits = wrapped(x)
                loss = loss_of(logits, y) / args.accumulate
                loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        if rank == 0:
            print(f"step {step} loss {total:.9g} norm {norm.item():.6g} lr {scheduler.get_last_lr()[0]:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
