"""A multi-task U-Net with batch norm: heads that rest in some steps, deep supervision, consistency of two forwards."""

import argparse
import json
import os
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as ac
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import always_wrap_policy, size_based_auto_wrap_policy
from transformers.optimization import Adafactor


class Double(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.Conv2d(cout, cout, 3, padding=1)
        self.bn1, self.bn2 = nn.BatchNorm2d(cout), nn.BatchNorm2d(cout, momentum=0.3)

    def forward(self, x):
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class Decoder(nn.Module):
    """Takes the list of skips. Returns the list of features, coarse to fine."""

    def __init__(self, widths):
        super().__init__()
        pairs = list(zip(widths[::-1][:-1], widths[::-1][1:], strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in pairs)
        self.mix = nn.ModuleList(Double(2 * b, b) for _, b in pairs)

    def forward(self, skips):
        x, found = skips[-1], []
        for up, mix, skip in zip(self.up, self.mix, skips[-2::-1], strict=True):
            x = mix(torch.cat([up(x), skip], dim=1))
            found.append(x)
        return found


class UNet(nn.Module):
    def __init__(self, widths=(12, 24, 40)):
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        self.down = nn.ModuleList(Double(a, b) for a, b in zip((widths[0], *widths[:-1]), widths, strict=True))
        self.decoder = Decoder(list(widths))
        self.heads = nn.ModuleDict(
            {
                "mask": nn.ModuleList(nn.Conv2d(w, 3, 1) for w in widths[-2::-1]),
                "depth": nn.Sequential(nn.Conv2d(widths[0], 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 1)),
                "count": nn.Sequential(nn.Linear(widths[-1], 32), nn.ReLU(), nn.Linear(32, 1)),
            }
        )

    def forward(self, images, tasks):
        x, skips = self.stem(images), []
        for i, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if i else x)
            skips.append(x)
        out = {}
        if "mask" in tasks or "depth" in tasks:
            features = self.decoder(skips)
            if "mask" in tasks:
                out["mask"] = [head(f) for head, f in zip(self.heads["mask"], features, strict=True)]
            if "depth" in tasks:
                out["depth"] = self.heads["depth"](features[-1])
        if "count" in tasks:
            out["count"] = self.heads["count"](skips[-1].mean(dim=(2, 3)))
        return out


def scenes(generator, n):
    """Up to three squares of two classes. The lighter they are, the nearer."""
    images, masks = 0.05 * torch.randn(n, 3, 24, 24, generator=generator), torch.zeros(n, 24, 24, dtype=torch.long)
    depth, count = torch.ones(n, 1, 24, 24), torch.randint(1, 4, (n,), generator=generator)
    for i in range(n):
        for _ in range(count[i]):
            top, left, kind, near = torch.randint(0, 16, (4,), generator=generator).tolist()
            place = (i, slice(None), slice(top, top + 8), slice(left, left + 8))
            images[place] += 0.3 + near / 16
            images[place][kind % 2] += 1
            masks[i, top : top + 8, left : left + 8] = 1 + kind % 2
            depth[place] = 1 - near / 16
    return images, {"mask": masks, "depth": depth, "count": count}


def losses(out, truth):
    found = {}
    if "mask" in out:
        found["mask"] = 0.0
        for k, logits in enumerate(out["mask"]):
            scale = 24 // logits.shape[-1]
            small = truth["mask"][:, ::scale, ::scale]
            found["mask"] = found["mask"] + F.cross_entropy(logits.float(), small) * (k + 1) / 2
    if "depth" in out:
        found["depth"] = F.smooth_l1_loss(out["depth"].float(), truth["depth"])
    if "count" in out:
        found["count"] = F.mse_loss(out["count"].float().squeeze(1), truth["count"].float())
    return found


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for q in group["params"]:
                if q.grad is None:
                    continue
                mean = self.state[q].setdefault("exp_avg", torch.zeros_like(q))
                q.mul_(1 - group["lr"] * group["weight_decay"])
                q.add_(mean.lerp(q.grad, 1 - b1).sign_(), alpha=-group["lr"])
                mean.lerp_(q.grad, 1 - b2)


def shard(model, args, world):
    policies = {
        "size": partial(size_based_auto_wrap_policy, min_num_params=3000, force_leaf_modules=set()),
        "always": always_wrap_policy,
        "none": None,
    }
    mesh = init_device_mesh("cpu", (world,) if "HYBRID" not in args.strategy else (2, world // 2))
    precision = None
    if args.precision != "fp32":
        low = args.precision == "bf16-low-grads"
        precision = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=low, cast_forward_inputs=True)
    return FSDP(
        model,
        sharding_strategy=ShardingStrategy[args.strategy],
        auto_wrap_policy=policies[args.wrap],
        mixed_precision=precision,
        backward_prefetch=BackwardPrefetch[args.prefetch] if args.prefetch != "NONE" else None,
        ignored_modules=[model.heads["count"]] if args.ignore_count else None,
        device_mesh=mesh,
        device_id=torch.device("cpu"),
        use_orig_params=args.orig_params,
    )


def main():
    p = argparse.ArgumentParser()
    p.add_argument("out")
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--strategy", default="FULL_SHARD")
    p.add_argument("--wrap", choices=["size", "always", "none"], default="size")
    p.add_argument("--precision", choices=["fp32", "bf16", "bf16-low-grads"], default="fp32")
    p.add_argument("--prefetch", default="BACKWARD_PRE")
    p.add_argument("--orig-params", action="store_true")
    p.add_argument("--ignore-count", action="store_true")
    p.add_argument("--recompute", choices=["reentrant", "plain", "offload"])
    p.add_argument("--optimizer", choices=["adam", "fused", "lion", "adafactor", "sgd"], default="adam")
    p.add_argument("--twice", action="store_true", help="a second forward of the mirrored images in every step")
    p.add_argument("--find-lr", action="store_true", help="some steps with growing rates first, then back to the start")
    p.add_argument("--save", action="store_true")
    p.add_argument("--load")
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(12)
    model = shard(UNet(), args, world)
    if args.recompute:
        wrap = {
            "reentrant": partial(ac.checkpoint_wrapper, checkpoint_impl=ac.CheckpointImpl.REENTRANT),
            "plain": partial(ac.checkpoint_wrapper, checkpoint_impl=ac.CheckpointImpl.NO_REENTRANT),
            "offload": ac.offload_wrapper,
        }[args.recompute]
        ac.apply_activation_checkpointing(model, wrap, check_fn=lambda m: isinstance(m, Double))
    optimizer = {
        "adam": partial(torch.optim.Adam, lr=3e-3, foreach=False),
        "fused": partial(torch.optim.AdamW, lr=3e-3, fused=True),
        "lion": partial(Lion, lr=1e-3, weight_decay=0.1),
        "adafactor": partial(Adafactor, lr=3e-3, relative_step=False, scale_parameter=False),
        "sgd": partial(torch.optim.SGD, lr=0.02, momentum=0.9, foreach=True),
    }[args.optimizer](model.parameters())
    generator = torch.Generator().manual_seed(60 + rank + 10 * bool(args.load))
    held, truth = scenes(torch.Generator().manual_seed(4), 8)
    figures = {"loss": [], "grad_norm": [], "valid": [], "found": [], "absent": []}

    def train_step(tasks):
        images, wanted = scenes(generator, 4)
        out = model(images, tasks)
        terms = losses(out, wanted)
        total = sum(terms.values())
        if args.twice and "depth" in tasks:
            mirrored = model(images.flip(-1), tasks)["depth"].flip(-1)
            total = total + 0.5 * F.l1_loss(mirrored.float(), out["depth"].detach().float())
        optimizer.zero_grad()
        total.backward()
        if args.ignore_count and "count" in tasks:
            for q in model.module.heads["count"].parameters():
                dist.all_reduce(q.grad)
                q.grad /= world
        absent = sum(q.grad is None for q in model.parameters())
        norm = model.clip_grad_norm_(2.0).item()
        optimizer.step()
        return {k: v.item() for k, v in terms.items()}, norm, absent

    if args.find_lr:
        with FSDP.summon_full_params(model, writeback=False):
            before = {k: v.detach().clone() for k, v in (*model.named_parameters(), *model.named_buffers())}
        kept = optimizer.param_groups[0]["lr"]
        for i in range(3):
            optimizer.param_groups[0]["lr"] = 1e-4 * 10**i
            figures["found"].append(train_step(["mask", "depth", "count"])[0])
        with FSDP.summon_full_params(model, writeback=True), torch.no_grad():
            for k, v in (*model.named_parameters(), *model.named_buffers()):
                v.copy_(before[k])
        optimizer.state.clear()
        optimizer.param_groups[0]["lr"] = kept
    start = 0
    if args.load:
        train_step(["mask", "depth", "count"])  # makes the state of the optimizer
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
            dcp.load(state, checkpoint_id=f"{args.load}/checkpoint")
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state["optim"]))
        start = 3

    order = [["mask", "depth", "count"], ["mask"], ["depth", "count"], ["count"], ["mask", "depth"], ["mask", "count"]]
    for step in range(start, args.steps):
        terms, norm, absent = train_step(order[step % 6])
        figures["loss"].append(terms)
        figures["grad_norm"].append(norm)
        figures["absent"].append(absent)
        if step % 2:
            model.eval()
            with torch.inference_mode():
                found = losses(model(held, ["mask", "depth", "count"]), truth)
            figures["valid"].append({k: v.item() for k, v in found.items()})
            model.train()

    if args.save:
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=f"{args.out}/checkpoint")
    figures["units"] = [n for n, m in model.named_modules() if isinstance(m, FSDP)]
    figures["buffers"] = {n: str(b.dtype) for n, b in model.named_buffers() if "bn1" in n}
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        weights = model.state_dict()
        optim = {"state": {}} if args.optimizer == "adafactor" else FSDP.optim_state_dict(model, optimizer)
    if rank == 0:
        os.makedirs(args.out, exist_ok=True)
        save_file({k: v.clone().contiguous() for k, v in weights.items()}, f"{args.out}/params.safetensors")
        flat = {f"{k}/{n}": torch.as_tensor(v).clone() for n, s in optim["state"].items() for k, v in s.items()}
        if flat:
            save_file(flat, f"{args.out}/optimizer.safetensors")
        with open(f"{args.out}/figures.json", "w") as f:
            json.dump(figures, f, indent=1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
