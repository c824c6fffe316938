"""Trains a small CLIP of open_clip on random images and captions, with its losses over ranks and its scheduler.

torchrun --nproc-per-node 2 train.py [--parallel fsdp2] [--local-loss] [--gather-with-grad] [--loss siglip]
python train.py --parallel none --batch 16 [--accumulate 2]

Leaving --gather-with-grad out next to --local-loss is the mistake.
"""

# ruff: noqa: E402

import argparse
import math
import os

import torch
import torch.distributed as dist

for operator in (
    "nms",
    "qnms",
):  # of torchvision, whose released wheels have them for CUDA alone; nothing here calls them
    torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from open_clip import CLIP, ClipLoss, CLIPTextCfg, CLIPVisionCfg
from open_clip.loss import SigLipLoss
from open_clip_train.scheduler import cosine_lr
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--parallel", choices=["ddp", "fsdp2", "none"], default="ddp")
parser.add_argument("--loss", choices=["clip", "siglip"], default="clip")
parser.add_argument("--siglip-impl", choices=["bidir", "shift", "reduce", "gather"], default="bidir")
parser.add_argument("--local-loss", action="store_true", help="Logits of the own samples alone, with all others.")
parser.add_argument("--gather-with-grad", action="store_true", help="Gradients go through the gathered features.")
parser.add_argument("--accumulate", type=int, default=1, help="Parts of a batch with cached features, on one rank.")
parser.add_argument("--batch", type=int, default=8, help="Samples of a rank.")
parser.add_argument("--steps", type=int, default=5)
args = parser.parse_args()

SIZE, VOCABULARY, LENGTH, WIDTH = 16, 64, 12, 32


def samples(step: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and captions of a rank, about the same things; captions end with the highest token and are padded with 0."""
    generator = torch.Generator().manual_seed(1000 + step)
    number = ranks * args.batch
    topics = torch.randint(1, VOCABULARY - 1, (number,), generator=generator)
    images = torch.randn(number, 3, SIZE, SIZE, generator=generator) + (topics / VOCABULARY * 4 - 2).view(-1, 1, 1, 1)
    texts = torch.randint(1, VOCABULARY - 1, (number, LENGTH), generator=generator)
    texts[:, 0] = topics
    ends = torch.randint(3, LENGTH, (number, 1), generator=generator)
    places = torch.arange(LENGTH)
    texts = torch.where(places < ends, texts, torch.where(places == ends, VOCABULARY - 1, 0))
    own = slice(rank * args.batch, (rank + 1) * args.batch)
    return images[own], texts[own]


def backward_in_parts(model, loss_fn, images, texts) -> torch.Tensor:
    """As accum_freq of open_clip: features of all parts without gradients first, then each part with gradients."""
    parts = list(zip(images.chunk(args.accumulate), texts.chunk(args.accumulate), strict=True))
    with torch.no_grad():
        cached = [model(*part)[:2] for part in parts]
    for i, part in enumerate(parts):
        image, text, scale = model(*part)[:3]
        image = torch.cat([image if j == i else other for j, (other, _) in enumerate(cached)])
        text = torch.cat([text if j == i else other for j, (_, other) in enumerate(cached)])
        loss = loss_fn(image, text, scale if i == 0 else scale.detach())  # the scale has its gradient once
        loss.backward()
    return loss


def main() -> None:
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if args.parallel != "none":
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = CLIP(
        embed_dim=24,
        vision_cfg=CLIPVisionCfg(layers=2, width=WIDTH, head_width=8, patch_size=4, image_size=SIZE),
        text_cfg=CLIPTextCfg(context_length=LENGTH, vocab_size=VOCABULARY, width=WIDTH, heads=4, layers=2),
        init_logit_scale=math.log(10) if args.loss == "siglip" else math.log(1 / 0.07),
        init_logit_bias=-10 if args.loss == "siglip" else None,
        nonscalar_logit_scale=True,
    )
    clip, scale = model, model.logit_scale
    if args.parallel == "fsdp2":
        for tower in (model.visual.transformer, model.transformer):
            for block in tower.resblocks:
                fully_shard(block)
        fully_shard(model)
        scale = clip.logit_scale
    elif args.parallel == "ddp":
        model = DistributedDataParallel(model)
    named = list(clip.named_parameters())
    plain = [p for n, p in named if p.ndim < 2 or "bn" in n or "ln" in n or "bias" in n or "logit_scale" in n]
    decayed = [p for _, p in named if not any(p is other for other in plain)]
    optimizer = torch.optim.AdamW(
        [{"params": plain, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.2}],
        lr=2e-3,
        betas=(0.9, 0.98),
        eps=1e-6,
    )
    scheduler = cosine_lr(optimizer, 2e-3, 2, 2 * args.steps)
    if args.loss == "siglip":
        loss_fn = SigLipLoss(rank=rank, world_size=ranks, dist_impl=args.siglip_impl)
    else:
        loss_fn = ClipLoss(args.local_loss, args.gather_with_grad, cache_labels=True, rank=rank, world_size=ranks)
    for step in range(args.steps):
        scheduler(step)
        images, texts = samples(step, rank, ranks)
        optimizer.zero_grad()
        if args.accumulate > 1:
            loss = backward_in_parts(model, loss_fn, images, texts)
        else:
            loss = loss_fn(*model(images, texts))
            loss.backward()
        optimizer.step()
        with torch.no_grad():
            scale.clamp_(0, math.log(100))
        loss = loss.detach()  # without its graph, which holds on to the group of ranks
        losses = loss.clone()
        if args.parallel != "none":
            dist.all_reduce(losses)
        if rank == 0:
            print(f"step {step} loss {loss.item():.9g} mean over ranks {losses.item() / ranks:.9g}")
    if args.parallel != "none":
        del model, loss_fn, loss, losses
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
