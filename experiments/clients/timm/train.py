"""Trains a vision transformer of timm on random images with timm's Mixup, layer decay, AGC, scheduler and EMA.

python train.py [--accumulate 2] [--drop-path 0.2] [--checkpoint] [--no-fused] [--no-ema] [--opt nadamw] [--mistake]
"""

# ruff: noqa: E402

import argparse

import torch

for operator in (
    "nms",
    "qnms",
):  # of torchvision, whose released wheels have them for CUDA alone; nothing here calls them
    torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import timm
from timm.data import Mixup
from timm.layers import set_fused_attn
from timm.loss import SoftTargetCrossEntropy
from timm.models import model_parameters
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3, dispatch_clip_grad, random_seed

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1, help="Microbatches of a step; the batch is divided.")
parser.add_argument("--opt", default="adamw", help="A name of timm's factory.")
parser.add_argument("--no-foreach", action="store_true", help="One parameter at a time in the optimizer and the EMA.")
parser.add_argument("--drop-path", type=float, default=0.0)
parser.add_argument("--checkpoint", action="store_true", help="Compute blocks again in backward.")
parser.add_argument("--no-fused", action="store_true", help="Attention written out.")
parser.add_argument("--no-ema", action="store_true", help="Average no weights, and evaluate nothing.")
parser.add_argument("--mistake", action="store_true", help="Clip after each microbatch.")
args = parser.parse_args()

SIZE, CLASSES = 32, 10


def images(number: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (number,), generator=generator)
    shades = torch.linspace(-2, 2, CLASSES)[labels].view(-1, 1, 1, 1)
    return shades + 0.5 * torch.randn(number, 3, SIZE, SIZE, generator=generator), labels


def main() -> None:
    random_seed(0)
    if args.no_fused:
        set_fused_attn(False)
    foreach = False if args.no_foreach else None
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=SIZE,
        patch_size=8,
        embed_dim=48,
        depth=4,
        num_heads=3,
        num_classes=CLASSES,
        init_values=0.1,
        drop_path_rate=args.drop_path,
    )
    model.set_grad_checkpointing(args.checkpoint)
    optimizer = create_optimizer_v2(
        model, opt=args.opt, lr=3e-3, weight_decay=0.05, filter_bias_and_bn=True, layer_decay=0.7, foreach=foreach
    )
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched="cosine",
        num_epochs=2,
        warmup_epochs=1,
        warmup_lr=1e-3,
        step_on_epochs=False,
        updates_per_epoch=args.steps,
    )
    ema = None if args.no_ema else ModelEmaV3(model, decay=0.9, use_warmup=True, foreach=not args.no_foreach)
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, prob=1.0, label_smoothing=0.1, num_classes=CLASSES)
    loss_fn = SoftTargetCrossEntropy()
    data, labels = images(args.batch * args.steps, seed=1)
    seen, seen_labels = images(args.batch, seed=2)

    for step in range(args.steps):
        rows = slice(step * args.batch, (step + 1) * args.batch)
        mixed, targets = mixup(data[rows].clone(), labels[rows])  # before the batch is divided
        model.train()
        total = 0.0
        for x, y in zip(mixed.chunk(args.accumulate), targets.chunk(args.accumulate), strict=True):
            loss = loss_fn(model(x), y) / args.accumulate
            loss.backward()
            total += loss.item()
            if args.mistake:
                dispatch_clip_grad(model_parameters(model, exclude_head=True), value=0.02, mode="agc")
        if not args.mistake:
            dispatch_clip_grad(model_parameters(model, exclude_head=True), value=0.02, mode="agc")
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step_update(num_updates=step + 1)
        line = f"step {step} loss {total:.9g} lr {optimizer.param_groups[-1]['lr']:.6f}"
        if ema is not None:
            ema.update(model, step=step)
            with torch.inference_mode():
                line += f" ema loss {torch.nn.functional.cross_entropy(ema.module(seen), seen_labels).item():.9g}"
        print(line)


if __name__ == "__main__":
    main()
