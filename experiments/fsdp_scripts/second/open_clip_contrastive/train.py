"""Contrastive training of an open_clip model: gathered features, cached features for accumulation, locked towers."""

import argparse
import json
import math
import os

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

# The torchvision of the registry is built for GPUs. Its operators are not needed, but their names are.
operators = torch.library.Library("torchvision", "DEF")
for operator in ("nms", "qnms"):
    operators.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import open_clip  # noqa: E402
from open_clip.loss import SigLipLoss  # noqa: E402
from open_clip.modified_resnet import Bottleneck, ModifiedResNet  # noqa: E402
from open_clip.transformer import ResidualAttentionBlock  # noqa: E402

TEXT = {"context_length": 12, "vocab_size": 64, "width": 48, "heads": 4, "layers": 2}
VIT = {"image_size": 32, "patch_size": 8, "width": 48, "head_width": 12, "layers": 3}
RESNET = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "head_width": 32}


def build(args, seed=5):
    torch.manual_seed(seed)
    siglip = args.loss == "siglip"
    kind = open_clip.CustomTextCLIP if args.custom_text else open_clip.CLIP
    return kind(
        embed_dim=32,
        vision_cfg=RESNET if args.resnet else VIT,
        text_cfg={**TEXT, "pool_type": "last"} if siglip else TEXT,
        init_logit_scale=math.log(10) if siglip else math.log(1 / 0.07),
        init_logit_bias=-10.0 if siglip else None,
        nonscalar_logit_scale=True,
        output_dict=True,
    )


def pairs(generator, n):
    """Pictures of one square. The text names its place, size and brightness."""
    top, left, size, light = torch.randint(0, 16, (4, n), generator=generator)
    images = 0.1 * torch.randn(n, 3, 32, 32, generator=generator)
    for i in range(n):
        images[i, :, top[i] : top[i] + 4 + size[i] // 2, left[i] : left[i] + 8] += 0.2 + light[i] / 8
    words = torch.stack([1 + top, 17 + left, 33 + size // 2, 41 + light // 2], 1)
    text = torch.cat([words, torch.full((n, 1), 63), torch.zeros(n, 7, dtype=torch.long)], 1)
    return images, text


def shard(model, args, **more):
    half = MixedPrecision(torch.bfloat16, torch.float32, torch.float32, cast_forward_inputs=True)
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({ResidualAttentionBlock, ModifiedResNet if args.whole else Bottleneck}),
        sharding_strategy=ShardingStrategy[args.strategy],
        mixed_precision=half if args.bf16 else None,
        device_id=torch.device("cpu"),
        use_orig_params=True,
        **more,
    )


def make_loss(args, rank, world):
    if args.loss == "siglip":
        return SigLipLoss(rank=rank, world_size=world, dist_impl=args.exchange)
    kind = open_clip.DistillClipLoss if args.distill else open_clip.ClipLoss
    return kind(local_loss=args.loss == "local", gather_with_grad=args.gather_grad, rank=rank, world_size=world)


def step_with_cache(model, loss_fn, micro):
    """Features of all micro-batches first, without gradients. Then each one again with gradients among the others."""
    with torch.no_grad():
        cached = [model(*m) for m in micro]
    total = 0.0
    for j, m in enumerate(micro):
        out = model(*m)
        fixed = {k: v for k, v in out.items() if k.startswith("logit_")}
        for k in ("image_features", "text_features"):
            fixed[k] = torch.cat([out[k] if i == j else c[k] for i, c in enumerate(cached)])
        loss = loss_fn(**fixed, output_dict=True)["contrastive_loss"]
        loss.backward()
        total += loss.item() / len(micro)
    return total


def state_dict_type(model):
    weights = FullStateDictConfig(rank0_only=False)
    return FSDP.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, weights, FullOptimStateDictConfig(rank0_only=False)
    )


def main():
    p = argparse.ArgumentParser()
    p.add_argument("out")
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--strategy", default="FULL_SHARD")
    p.add_argument("--loss", choices=["clip", "local", "siglip"], default="clip")
    p.add_argument("--gather-grad", action="store_true")
    p.add_argument("--exchange", default="bidir", help="how siglip passes the texts around")
    p.add_argument("--distill", action="store_true")
    p.add_argument("--resnet", action="store_true")
    p.add_argument("--whole", action="store_true", help="one unit for the whole ResNet")
    p.add_argument("--custom-text", action="store_true")
    p.add_argument("--lock-image", type=int, help="groups of the image tower that stay unlocked")
    p.add_argument("--bf16", action="store_true")
    p.add_argument("--checkpointing", action="store_true")
    p.add_argument("--accum-freq", type=int, default=1)
    p.add_argument("--save", action="store_true")
    p.add_argument("--load")
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(args)
    if args.lock_image is not None:
        model.lock_image_tower(unlocked_groups=args.lock_image, freeze_bn_stats=True)
    model = shard(model, args, forward_prefetch=True)
    if args.checkpointing:
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=lambda m: checkpoint_wrapper(m, checkpoint_impl=CheckpointImpl.REENTRANT),
            check_fn=lambda m: isinstance(m, ResidualAttentionBlock),
        )
    teacher = shard(build(args, seed=77).eval().requires_grad_(False), args) if args.distill else None
    plain, decayed = [], []
    for name, q in model.named_parameters():
        if q.requires_grad:
            (plain if any(s in name for s in ("bn", "ln_", "bias", "logit_scale")) else decayed).append(q)
    groups = [{"params": plain, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.2}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.98), eps=1e-6)
    loss_fn = make_loss(args, rank, world)

    start = 0
    if args.load:
        saved = torch.load(f"{args.load}/checkpoint/epoch.pt", weights_only=True)
        with state_dict_type(model):
            model.load_state_dict(saved["state_dict"])
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, saved["optimizer"]))
        start = saved["step"]

    generator = torch.Generator().manual_seed(1000 * start + rank)
    held = pairs(torch.Generator().manual_seed(3), 12)
    figures = {"loss": [], "grad_norm": [], "logit_scale": [], "lr": [], "recall": [], "valid": []}
    for step in range(start, args.steps):
        model.train()
        lr = open_clip_schedule(step)
        for g in optimizer.param_groups:
            g["lr"] = lr
        optimizer.zero_grad()
        if args.accum_freq > 1:
            loss = step_with_cache(model, loss_fn, [pairs(generator, 4) for _ in range(args.accum_freq)])
        else:
            batch = pairs(generator, 8)
            out = model(*batch)
            if args.distill:
                with torch.no_grad():
                    out.update({f"dist_{k}": v for k, v in teacher(*batch).items()})
            losses = loss_fn(**out, output_dict=True)
            sum(losses.values()).backward()
            loss = sum(losses.values()).item()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        with FSDP.summon_full_params(model, recurse=False), torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
            figures["logit_scale"].append(model.logit_scale.exp().item())
        mean = torch.tensor(loss)
        dist.all_reduce(mean)
        figures["loss"].append(mean.item() / world)
        figures["grad_norm"].append(norm.item())
        figures["lr"].append(lr)
        if step % 2:
            model.eval()
            with torch.inference_mode():
                out = model(*held)
            similar = (out["image_features"] @ out["text_features"].T).float()
            figures["recall"].append((similar.argmax(1) == torch.arange(12)).float().mean().item())
            figures["valid"].append(torch.nn.functional.cross_entropy(20 * similar, torch.arange(12)).item())

    figures["trainable"] = sum(q.numel() for g in groups for q in g["params"])
    figures["units"] = len(FSDP.fsdp_modules(model))
    figures["features"] = str(out["image_features"].dtype)
    with state_dict_type(model):
        weights, optim = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    if rank == 0:
        if args.save:
            os.makedirs(f"{args.out}/checkpoint", exist_ok=True)
            saved = {"state_dict": weights, "optimizer": optim, "step": args.steps}
            torch.save(saved, f"{args.out}/checkpoint/epoch.pt")
        os.makedirs(args.out, exist_ok=True)
        save_file({k: v.clone() for k, v in weights.items()}, f"{args.out}/params.safetensors")
        flat = {f"{k}/{name}": v.clone() for name, s in optim["state"].items() for k, v in s.items()}
        save_file(flat, f"{args.out}/optimizer.safetensors")
        with open(f"{args.out}/figures.json", "w") as f:
            json.dump(figures, f, indent=1)
    dist.barrier()
    dist.destroy_process_group()


def open_clip_schedule(step, base=2e-3, warmup=2, total=8):
    if step < warmup:
        return base * (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) * base


if __name__ == "__main__":
    main()
