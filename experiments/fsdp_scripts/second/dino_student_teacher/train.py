"""Self-distillation in the manner of DINOv2: student and averaged teacher on a small ViT, many crops, masks, two heads."""

import argparse
import json
import math
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.distributed._composable.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils.parametrizations import weight_norm
from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel

GLOBAL, LOCAL, PATCH, DIM, PROTOTYPES = 24, 12, 4, 48, 64


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(DIM, 80), nn.GELU(), nn.Linear(80, 32))
        self.last = weight_norm(nn.Linear(32, PROTOTYPES, bias=False))
        self.last.parametrizations.weight.original0.data.fill_(1.0)
        self.last.parametrizations.weight.original0.requires_grad_(False)

    def forward(self, x):
        return self.last(F.normalize(self.mlp(x), dim=-1, eps=1e-6))


class Network(nn.Module):
    def __init__(self, drop_path):
        super().__init__()
        config = Dinov2WithRegistersConfig(
            hidden_size=DIM, num_hidden_layers=3, num_attention_heads=4, mlp_ratio=2, image_size=GLOBAL,
            patch_size=PATCH, num_register_tokens=3, drop_path_rate=drop_path, layerscale_value=0.3,
        )  # fmt: skip
        self.backbone = Dinov2WithRegistersModel(config)
        self.cls_head, self.patch_head = Head(), Head()

    def forward(self, images, masks=None):
        hidden = self.backbone(pixel_values=images, bool_masked_pos=masks).last_hidden_state
        out = {"cls": self.cls_head(hidden[:, 0])}
        out["feature"] = hidden[:, 0]
        if masks is not None:
            out["patches"] = self.patch_head(hidden[:, 4:][masks])
        return out

    def describe(self, images):
        return F.normalize(self.backbone(pixel_values=images).pooler_output.float(), dim=-1)


def shard(net, args, mesh):
    policy, outer = MixedPrecisionPolicy(), MixedPrecisionPolicy()
    if args.bf16:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        outer = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    options = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": not args.keep}

    def wide(q):
        """Big matrices are split by columns."""
        return Shard(1) if q.ndim == 2 and q.shape[1] % mesh.size(-1) == 0 and q.shape[0] > 60 else None

    layers = net.backbone.encoder.layer
    for layer in layers:
        if args.compile:
            layer.compile(backend="aot_eager")
        fully_shard(layer, **options, shard_placement_fn=wide if args.shard_columns else None)
    fully_shard(net.backbone.embeddings, **options)
    fully_shard(net.cls_head, **options)
    fully_shard(net.patch_head, **options)
    fully_shard(net, **options | {"mp_policy": outer})
    # No gradient of the images is needed, so the embeddings' weights stay away during the backward.
    net.backbone.embeddings.set_unshard_in_backward(False)
    net.backbone.embeddings.set_modules_to_forward_prefetch([layers[0], layers[1]])
    for i, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(list(layers[i + 1 : i + 3]))
        layer.set_modules_to_backward_prefetch(list(reversed(layers[max(0, i - 2) : i])))
    register_fsdp_forward_method(net, "describe")
    if args.divide:
        for module in net.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(args.divide)
                module.set_force_sum_reduction_for_comms(True)
    return net


@torch.no_grad()
def sinkhorn(logits, temperature):
    q = torch.exp(logits.float() / temperature).T
    count = torch.tensor(float(q.shape[1]))
    dist.all_reduce(count)
    total = q.sum()
    dist.all_reduce(total)
    q = q / total
    for _ in range(3):
        rows = q.sum(1, keepdim=True)
        dist.all_reduce(rows)
        q = q / rows / len(q)
        q = q / q.sum(0, keepdim=True) / count
    return (q * count).T


def cross(student, teacher, temperature=0.1):
    return -(teacher * F.log_softmax(student.float() / temperature, -1)).sum(-1).mean()


def koleo(features):
    x = F.normalize(features.float(), dim=-1)
    near = (x @ x.T - 2 * torch.eye(len(x))).argmax(1)
    return -torch.log((x - x[near]).norm(dim=-1) + 1e-8).mean()


def param_groups(net):
    groups = {}
    for name, q in net.named_parameters():
        if not q.requires_grad:
            continue
        depth = int(name.split("layer.")[1].split(".")[0]) + 1 if "layer." in name else 0 if "embeddings" in name else 4
        groups.setdefault((0.8 ** (4 - depth), 0.0 if q.ndim == 1 else 1.0, ".last." in name), []).append(q)
    keys = ("lr_scale", "decay_scale", "last")
    return [{"params": params, **dict(zip(keys, key, strict=True))} for key, params in groups.items()]


class Training(Stateful):
    def __init__(self, student, teacher, optimizer):
        self.student, self.teacher, self.optimizer, self.step = student, teacher, optimizer, 0

    def state_dict(self):
        weights, moments = get_state_dict(self.student, self.optimizer)
        teacher = get_model_state_dict(self.teacher)
        return {"student": weights, "optimizer": moments, "teacher": teacher, "step": self.step}

    def load_state_dict(self, state):
        set_state_dict(
            self.student, self.optimizer, model_state_dict=state["student"], optim_state_dict=state["optimizer"]
        )
        set_model_state_dict(self.teacher, state["teacher"])
        self.step = state["step"]


def crops(step, rank, batch=4):
    rng = torch.Generator().manual_seed(1000 * step + rank)
    color, phase = torch.rand(batch, 3, 1, 1, generator=rng), torch.rand(batch, 1, 1, 1, generator=rng) * 6
    grid = torch.linspace(0, 6, GLOBAL)
    whole = color * torch.sin(grid[:, None] + phase) + (1 - color) * torch.cos(2 * grid[None] - phase)
    views = [whole + 0.2 * torch.randn(whole.shape, generator=rng) for _ in range(2)]
    small = []
    for _ in range(3):
        y, x = torch.randint(0, GLOBAL - LOCAL, (2,), generator=rng).tolist()
        small.append(
            whole[..., y : y + LOCAL, x : x + LOCAL] + 0.2 * torch.randn(batch, 3, LOCAL, LOCAL, generator=rng)
        )
    masks = torch.rand(2 * batch, (GLOBAL // PATCH) ** 2, generator=rng) < 0.3
    return torch.cat(views), torch.cat(small), masks


def main():
    p = argparse.ArgumentParser()
    p.add_argument("out", type=Path)
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--bf16", action="store_true")
    p.add_argument("--hsdp", action="store_true")
    p.add_argument("--keep", action="store_true", help="do not reshard after the forward")
    p.add_argument("--compile", action="store_true")
    p.add_argument("--shard-columns", action="store_true")
    p.add_argument("--divide", type=float)
    p.add_argument("--drop-path", type=float, default=0.1)
    p.add_argument("--local-backward", action="store_true", help="a backward of its own for the local crops")
    p.add_argument("--save", action="store_true")
    p.add_argument("--load", type=Path)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    shape, names = ((world // 2, 2), ("replicate", "shard")) if args.hsdp else ((world,), ("shard",))
    mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)

    torch.manual_seed(31)
    student, teacher = Network(args.drop_path), Network(0.0)
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    shard(student, args, mesh)
    shard(teacher, args, mesh)
    teacher.eval()
    optimizer = torch.optim.AdamW(param_groups(student), betas=(0.9, 0.99))
    training = Training(student, teacher, optimizer)
    if args.load:
        dcp.load({"training": training}, checkpoint_id=args.load / "checkpoint")
    pairs = list(zip(student.parameters(), teacher.parameters(), strict=True))

    figures = {"losses": [], "parts": [], "grad_norms": [], "momentum": []}
    for step in range(training.step, args.steps):
        torch.manual_seed(77 * step + rank)
        lr = 4e-3 * min(1.0, (step + 1) / 3) * 0.5 * (1 + math.cos(math.pi * step / 10))
        for group in optimizer.param_groups:
            group["lr"] = 0.0 if group["last"] and step < 1 else lr * group["lr_scale"]
            group["weight_decay"] = (0.04 + 0.02 * step) * group["decay_scale"]
        big, small, masks = crops(step, rank)
        with torch.no_grad():
            targets = teacher(big, masks)
            cls_targets = sinkhorn(targets["cls"], 0.07).chunk(2)
            patch_targets = sinkhorn(targets["patches"], 0.07)
        out = student(big, masks)
        a, b = out["cls"].chunk(2)
        loss_global = (cross(a, cls_targets[1]) + cross(b, cls_targets[0])) / 2
        loss_patch = cross(out["patches"], patch_targets)
        loss_koleo = sum(koleo(f) for f in out["feature"].chunk(2)) / 2
        loss = loss_global + loss_patch + 0.1 * loss_koleo
        if args.local_backward:
            # First half of the gradients: kept back on every rank until the local crops are through, too.
            student.set_requires_gradient_sync(False)
            loss.backward()
            student.set_requires_gradient_sync(True)
        locals_ = student(small)["cls"].chunk(3)
        loss_local = sum(cross(view, target) for view in locals_ for target in cls_targets) / 6
        (loss_local if args.local_backward else loss + loss_local).backward()
        if args.divide:
            for q, _ in pairs:
                if q.grad is not None:
                    q.grad.mul_(args.divide / world)
        norms = []
        for part in (student.backbone, student.cls_head, student.patch_head):
            norm = nn.utils.clip_grad_norm_(part.parameters(), 0.5)
            norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        momentum = 1 - 0.1 * (math.cos(math.pi * step / 10) + 1) / 2
        with torch.no_grad():
            torch._foreach_mul_([t for _, t in pairs], momentum)
            torch._foreach_add_([t for _, t in pairs], [s.detach() for s, _ in pairs], alpha=1 - momentum)
        parts = torch.stack([x.detach() for x in (loss_global, loss_patch, loss_koleo, loss_local)])
        dist.all_reduce(parts)
        figures["parts"].append((parts / world).tolist())
        figures["losses"].append((parts / world).sum().item())
        figures["grad_norms"].append(norms)
        figures["momentum"].append(momentum)
        training.step = step + 1

    with torch.no_grad():
        described = teacher.describe(crops(9000, 0)[0])
    teacher.reshard()
    figures["similarity"] = (described[:4] * described[4:]).sum(-1).tolist()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.save:
        dcp.save({"training": training}, checkpoint_id=args.out / "checkpoint")
        if rank == 0:
            dcp_to_torch_save(args.out / "checkpoint", args.out / "checkpoint" / "single.pt")
            single = torch.load(args.out / "checkpoint" / "single.pt", weights_only=False)["training"]
            figures["single_keys"] = sorted(single["student"])
            figures["single_norm"] = sum(v.double().square().sum() for v in single["teacher"].values()).sqrt().item()
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = {f"student.{k}": v for k, v in get_model_state_dict(student, options=full).items()}
    weights |= {f"teacher.{k}": v for k, v in get_model_state_dict(teacher, options=full).items()}
    moments = get_optimizer_state_dict(student, optimizer, options=full)
    figures["placements"] = {n: str(q.placements) for n, q in student.named_parameters()}
    figures["trained"] = sum(q.numel() for q in student.parameters() if q.requires_grad)
    if rank == 0:
        (args.out / "figures.json").write_text(json.dumps(figures, indent=1))
        save_file({k: v.contiguous() for k, v in weights.items()}, args.out / "params.safetensors")
        flat = {f"{s}/{n}": t.contiguous() for n, entry in moments["state"].items() for s, t in entry.items()}
        save_file(flat, args.out / "optimizer.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
