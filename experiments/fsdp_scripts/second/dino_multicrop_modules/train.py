"""Self-distillation on crops: a student and its averaged teacher, each a ModuleDict of separately sharded parts."""

import argparse
import json
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Block(nn.Module):
    def __init__(self, dim, drop_path):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim))
        self.gamma1, self.gamma2 = nn.Parameter(0.1 * torch.ones(dim)), nn.Parameter(0.1 * torch.ones(dim))
        self.drop_path = drop_path

    def residual(self, y):
        if not self.training or not self.drop_path:
            return y
        keep = torch.rand(len(y), 1, 1) >= self.drop_path
        return y * keep / (1 - self.drop_path)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d)
        x = x + self.residual(self.gamma1 * self.proj(y))
        return x + self.residual(self.gamma2 * self.mlp(self.norm2(x)))


class Backbone(nn.Module):
    def __init__(self, dim=48, depth=3, drop_path=0.0):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 8, stride=8)
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, dim))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, dim, 4, 4))
        self.blocks = nn.ModuleList(Block(dim, drop_path * i / (depth - 1)) for i in range(depth))
        self.norm = nn.LayerNorm(dim)

    def forward(self, images):
        x = self.patch_embed(images)
        pos = F.interpolate(self.pos_embed.float(), size=x.shape[-2:], mode="bilinear", align_corners=False)
        x = (x + pos.to(x.dtype)).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)[:, 0]


class Head(nn.Module):
    def __init__(self, dim=48, prototypes=96):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, 32))
        self.last_layer = nn.utils.weight_norm(nn.Linear(32, prototypes, bias=False))
        self.last_layer.weight_g.data.fill_(1)

    def forward(self, x):
        return self.last_layer(F.normalize(self.mlp(x), dim=-1))


def shard(module, args, groups, teacher):
    half = torch.bfloat16
    precision = None
    if args.bf16:
        precision = MixedPrecision(param_dtype=half, reduce_dtype=half if teacher else torch.float32, buffer_dtype=half)
    strategy = args.teacher_strategy if teacher else args.strategy
    return FSDP(
        module,
        sharding_strategy=ShardingStrategy[strategy],
        process_group=groups if "HYBRID" in strategy else None,
        mixed_precision=precision,
        device_id=torch.device("cpu"),
        use_orig_params=True,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        forward_prefetch=args.forward_prefetch,
    )


def groups_with_layer_decay(student, decay):
    """Every layer learns slower than the next one. Vectors are not decayed."""
    groups = {}
    for part, module in student.items():
        for name, q in module.named_parameters():
            depth = 4 if part == "head" or "norm" in name.split(".")[0] else 0
            if "blocks." in name:
                depth = 1 + int(name.split("blocks.")[1].split(".")[0])
            plain = name.endswith((".bias", "bias")) or "norm" in name or "gamma" in name
            key = (depth, plain, "last_layer" in name)
            lr = decay ** (4 - depth) * (0.2 if "patch_embed" in name else 1.0)
            groups.setdefault((*key, lr), []).append(q)
    return [
        {"params": g, "lr_scale": lr, "decays": not plain, "last_layer": last}
        for (_, plain, last, lr), g in groups.items()
    ]


def crops(generator, n):
    """Coloured gradients. Two large and three small views of every image."""
    colour = torch.rand(n, 3, 1, 1, generator=generator)
    angle = 6.28 * torch.rand(n, 1, 1, 1, generator=generator)
    grid = torch.linspace(-1, 1, 40)
    image = colour + 0.5 * torch.sin(3 * (grid.view(1, 1, 1, 40) * angle.cos() + grid.view(1, 1, 40, 1) * angle.sin()))

    def view(size):
        top, left = torch.randint(0, 41 - size, (2,), generator=generator).tolist()
        cut = image[:, :, top : top + size, left : left + size]
        return cut + 0.1 * torch.randn(cut.shape, generator=generator)

    return torch.cat([view(32) for _ in range(2)]), torch.cat([view(16) for _ in range(3)])


@torch.no_grad()
def sinkhorn(scores, temperature=0.07):
    q = torch.exp(scores.float() / temperature).t()
    count = torch.tensor(float(q.shape[1]))
    dist.all_reduce(count)
    total = q.sum()
    dist.all_reduce(total)
    q /= total
    for _ in range(3):
        rows = q.sum(1, keepdim=True)
        dist.all_reduce(rows)
        q /= rows * q.shape[0]
        q /= q.sum(0, keepdim=True) * count
    return (q * count).t()


def koleo(x):
    x = F.normalize(x.float(), dim=-1)
    nearest = (x @ x.t() - 2 * torch.eye(len(x))).argmax(1)
    return -torch.log(F.pairwise_distance(x, x[nearest]) + 1e-8).mean()


@torch.no_grad()
def update_teacher(student, teacher, momentum):
    for name in student:
        mine = [q for m in FSDP.fsdp_modules(student[name]) for q in m.params]
        theirs = [q for m in FSDP.fsdp_modules(teacher[name]) for q in m.params]
        torch._foreach_mul_(theirs, momentum)
        torch._foreach_add_(theirs, mine, alpha=1 - momentum)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("out")
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--strategy", default="SHARD_GRAD_OP")
    p.add_argument("--teacher-strategy", default="SHARD_GRAD_OP")
    p.add_argument("--bf16", action="store_true")
    p.add_argument("--forward-prefetch", action="store_true")
    p.add_argument("--drop-path", type=float, default=0.0)
    p.add_argument("--checkpointing", action="store_true")
    p.add_argument("--centering", choices=["softmax", "sinkhorn"], default="softmax")
    p.add_argument("--freeze-last", type=int, default=1, help="steps without gradients of the last layer")
    p.add_argument("--save", action="store_true")
    p.add_argument("--load")
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = None
    if "HYBRID" in args.strategy + args.teacher_strategy:
        inner = [dist.new_group([i, i + 1]) for i in range(0, world, 2)][rank // 2]
        outer = [dist.new_group(list(range(i, world, 2))) for i in range(2)][rank % 2]
        groups = (inner, outer)
    torch.manual_seed(30)
    student = nn.ModuleDict({"backbone": Backbone(drop_path=args.drop_path), "head": Head()})
    teacher = nn.ModuleDict({"backbone": Backbone(), "head": Head()})
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False).eval()
    for name in student:
        student[name] = shard(student[name], args, groups, teacher=False)
        teacher[name] = shard(teacher[name], args, groups, teacher=True)
    if args.checkpointing:
        apply_activation_checkpointing(student, check_fn=lambda m: isinstance(m, Block))
    optimizer = torch.optim.AdamW(groups_with_layer_decay(student, 0.8), betas=(0.9, 0.99), foreach=True)
    center = torch.zeros(1, 96)

    start = 0
    file = "{}/checkpoint/model.rank_{}.pth"
    if args.load:
        saved = torch.load(file.format(args.load, rank), weights_only=False)
        for name, model in (("student", student), ("teacher", teacher)):
            with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                model.load_state_dict(saved[name])
        optimizer.load_state_dict(saved["optimizer"])
        center, start = saved["center"], saved["step"]

    generator = torch.Generator().manual_seed(50 * start + rank)
    torch.manual_seed(70 + rank)
    figures = {"loss": [], "koleo": [], "grad_norm": [], "lr": [], "weight_decay": [], "momentum": [], "entropy": []}
    for step in range(start, args.steps):
        t = step / 8
        lr = 4e-3 * min(1.0, (step + 1) / 2) * (0.5 + 0.5 * math.cos(math.pi * t))
        decay = 0.4 - 0.36 * (0.5 + 0.5 * math.cos(math.pi * t))
        momentum = 1 - 0.1 * (0.5 + 0.5 * math.cos(math.pi * t))
        for g in optimizer.param_groups:
            g["lr"] = 0.0 if g["last_layer"] and step < args.freeze_last else lr * g["lr_scale"]
            g["weight_decay"] = decay * g["decays"]
        large, small = crops(generator, 4)
        with torch.no_grad():
            scores = teacher["head"](teacher["backbone"](large)).float()
            if args.centering == "sinkhorn":
                targets = sinkhorn(scores).chunk(2)
            else:
                targets = F.softmax((scores - center) / 0.07, dim=-1).chunk(2)
                mean = scores.mean(0, keepdim=True)
                dist.all_reduce(mean)
                center = 0.9 * center + 0.1 * mean / world
        optimizer.zero_grad(set_to_none=True)
        tokens_large, tokens_small = student["backbone"](large), student["backbone"](small)
        guesses = F.log_softmax(student["head"](torch.cat([tokens_large, tokens_small])).float() / 0.1, dim=-1)
        views = list(guesses[:8].chunk(2)) + list(guesses[8:].chunk(3))
        terms = [-(q * v).sum(-1).mean() for i, q in enumerate(targets) for j, v in enumerate(views) if i != j]
        spread = sum(koleo(x) for x in tokens_large.chunk(2))
        loss = sum(terms) / len(terms) + 0.1 * spread
        loss.backward()
        norms = [module.clip_grad_norm_(3.0).item() for module in student.values()]
        optimizer.step()
        update_teacher(student, teacher, momentum)
        entropy = -sum((q * q.clamp_min(1e-9).log()).sum(-1).mean() for q in targets) / 2
        means = torch.stack([loss.detach(), spread.detach().float(), entropy])
        dist.all_reduce(means)
        for key, value in zip(("loss", "koleo", "entropy"), (means / world).tolist(), strict=True):
            figures[key].append(value)
        figures["grad_norm"].append(norms)
        for key, value in (("lr", lr), ("weight_decay", decay), ("momentum", momentum)):
            figures[key].append(value)

    if args.save:
        saved = {"optimizer": optimizer.state_dict(), "center": center, "step": args.steps}
        for name, model in (("student", student), ("teacher", teacher)):
            with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                saved[name] = model.state_dict()
        os.makedirs(f"{args.out}/checkpoint", exist_ok=True)
        torch.save(saved, file.format(args.out, rank))
        figures["shard_kinds"] = sorted({type(v).__name__ for v in saved["student"].values()})
    with torch.no_grad():
        held = crops(torch.Generator().manual_seed(8), 6)[0]
        features = F.normalize(teacher["backbone"](held).float(), dim=-1)
        figures["similarity"] = (features[:6] * features[6:]).sum(-1).tolist()
    figures["center"] = center.mean().item()
    figures["groups"] = [[g["lr_scale"], sum(q.numel() for q in g["params"])] for g in optimizer.param_groups]
    tensors, optim = {}, {}
    for who, model in (("student", student), ("teacher", teacher)):
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            tensors.update({f"{who}.{k}": v.clone() for k, v in model.state_dict().items()})
            if who == "student":
                optim = FSDP.optim_state_dict(model, optimizer)
    if rank == 0:
        os.makedirs(args.out, exist_ok=True)
        save_file(tensors, f"{args.out}/params.safetensors")
        flat = {f"{k}/{name}": v.clone() for name, s in optim["state"].items() for k, v in s.items()}
        save_file(flat, f"{args.out}/optimizer.safetensors")
        with open(f"{args.out}/figures.json", "w") as f:
            json.dump(figures, f, indent=1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
