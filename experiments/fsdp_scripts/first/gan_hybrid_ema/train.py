"""A small image GAN: two sharded models with their own optimizers, and an averaged copy of the generator."""

import argparse
import copy
import json
import os
from contextlib import ExitStack, nullcontext

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy


class Up(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 3, padding=1)
        self.norm = nn.GroupNorm(4, cout)

    def forward(self, x):
        return F.silu(self.norm(self.conv(F.interpolate(x, scale_factor=2))))


class Down(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 4, stride=2, padding=1)

    def forward(self, x):
        return F.leaky_relu(self.conv(x), 0.2)


class Generator(nn.Module):
    def __init__(self, latent=24, width=32):
        super().__init__()
        self.width = width
        self.first = nn.Linear(latent, width * 16)
        self.blocks = nn.Sequential(Up(width, width), Up(width, width // 2))
        self.last = nn.Conv2d(width // 2, 1, 3, padding=1)
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, z):
        x = self.first(z).view(len(z), self.width, 4, 4)
        return torch.tanh(self.last(self.blocks(x)) * self.scale)


class Discriminator(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.blocks = nn.Sequential(Down(1, width), Down(width, 2 * width))
        self.last = nn.Linear(2 * width * 16, 1)

    def forward(self, image):
        return self.last(self.blocks(image).flatten(1)).squeeze(1)


def real_images(n, generator):
    """Soft discs at random places."""
    centre = torch.rand(n, 2, 1, 1, generator=generator) * 10 + 3
    grid = torch.arange(16.0)
    distance = (grid.view(1, 1, 16) - centre[:, 0]) ** 2 + (grid.view(1, 16, 1) - centre[:, 1]) ** 2
    return (2 * torch.exp(-distance / 8) - 1).unsqueeze(1)


def shard(model, args, mesh):
    kwargs = {}
    if args.precision != "fp32":
        kwargs["mixed_precision"] = fsdp.MixedPrecision(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32 if args.precision == "bf16_reduce32" else None,
            buffer_dtype=torch.bfloat16,
            _module_classes_to_ignore=(nn.GroupNorm,),
        )
    if args.policy == "classes":
        policy = ModuleWrapPolicy([Up, Down])
    else:
        policy = CustomPolicy(lambda m: {"forward_prefetch": True} if isinstance(m, nn.Conv2d) else False)
    return fsdp.FullyShardedDataParallel(
        model,
        sharding_strategy=fsdp.ShardingStrategy[args.strategy],
        auto_wrap_policy=policy,
        device_id=torch.device("cpu"),
        device_mesh=mesh,
        use_orig_params=args.orig_params,
        **kwargs,
    )


@torch.no_grad()
def average(target, source, decay):
    for a, b in zip(target.parameters(), source.parameters(), strict=True):
        a.lerp_(b, 1 - decay)


def checkpoint(gen, ema, disc, g_opt, d_opt):
    gen_weights, gen_optim = get_state_dict(gen, g_opt)
    disc_weights, disc_optim = get_state_dict(disc, d_opt)
    return {
        "gen": gen_weights, "gen_optim": gen_optim,
        "disc": disc_weights, "disc_optim": disc_optim, "ema": get_model_state_dict(ema),
    }  # fmt: skip


def main():
    p = argparse.ArgumentParser()
    p.add_argument("out")
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--strategy", default="FULL_SHARD")
    p.add_argument("--precision", choices=["fp32", "bf16_reduce32", "bf16"], default="fp32")
    p.add_argument("--policy", choices=["classes", "custom"], default="classes")
    p.add_argument("--orig-params", action="store_true")
    p.add_argument("--accumulate", type=int, default=1)
    p.add_argument("--no-sync", action="store_true")
    p.add_argument("--scaler", action="store_true")
    p.add_argument("--foreach", action="store_true")
    p.add_argument("--save", action="store_true")
    p.add_argument("--load")
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    # With a mesh the sharded state dicts hold DTensors.
    if "HYBRID" in args.strategy:
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(100)
    plain = Generator()
    ema_plain = copy.deepcopy(plain).requires_grad_(False)
    gen, ema, disc = shard(plain, args, mesh), shard(ema_plain, args, mesh), shard(Discriminator(), args, mesh)
    g_opt = torch.optim.Adam(gen.parameters(), lr=2e-3, betas=(0.5, 0.99), foreach=args.foreach)
    d_opt = torch.optim.RMSprop(disc.parameters(), lr=1e-3, foreach=args.foreach)
    scalers = [ShardedGradScaler(device="cpu", init_scale=64.0, growth_interval=3, enabled=args.scaler) for _ in "gd"]

    if args.load:
        state = checkpoint(gen, ema, disc, g_opt, d_opt)
        dcp.load(state, checkpoint_id=f"{args.load}/checkpoint")
        set_state_dict(gen, g_opt, model_state_dict=state["gen"], optim_state_dict=state["gen_optim"])
        set_state_dict(disc, d_opt, model_state_dict=state["disc"], optim_state_dict=state["disc_optim"])
        set_model_state_dict(ema, state["ema"])

    noise = torch.Generator().manual_seed((70 if args.load else 50) + rank)
    fixed = torch.randn(4, 24, generator=torch.Generator().manual_seed(9))
    figures = {"d_loss": [], "g_loss": [], "d_norm": [], "g_norm": [], "scale": []}

    def mean(x):
        x = x.detach().float().clone()
        dist.all_reduce(x)
        return x.item() / world

    def micro_steps(model, optimizer, scaler, loss_fn, name):
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for i in range(args.accumulate):
            last = i == args.accumulate - 1
            with model.no_sync() if args.no_sync and not last else nullcontext():
                loss = loss_fn() / args.accumulate
                scaler.scale(loss).backward()
            total += mean(loss)
        scaler.unscale_(optimizer)
        figures[f"{name}_norm"].append(model.clip_grad_norm_(5.0).item())
        scaler.step(optimizer)
        scaler.update()
        figures[f"{name}_loss"].append(total)

    def d_loss():
        real = real_images(6, noise)
        with torch.no_grad():
            fake = gen(torch.randn(6, 24, generator=noise))
        scores = disc(torch.cat([real, fake.float()])).float()
        return F.softplus(-scores[:6]).mean() + F.softplus(scores[6:]).mean()

    def g_loss():
        return F.softplus(-disc(gen(torch.randn(6, 24, generator=noise))).float()).mean()

    for _ in range(args.steps):
        micro_steps(disc, d_opt, scalers[1], d_loss, "d")
        disc.requires_grad_(False)
        micro_steps(gen, g_opt, scalers[0], g_loss, "g")
        disc.requires_grad_(True)
        average(ema, gen, 0.9)
        figures["scale"].append([s.get_scale() for s in scalers])

    if args.save:
        dcp.save(checkpoint(gen, ema, disc, g_opt, d_opt), checkpoint_id=f"{args.out}/checkpoint")
    with torch.no_grad():
        figures["sample"] = ema(fixed).float().mean(dim=(1, 2, 3)).tolist()
        figures["buffer"] = [gen.scale.item(), str(gen.scale.dtype)]
    figures["local_numel"] = {n: sum(q.numel() for q in m.parameters()) for n, m in (("gen", gen), ("disc", disc))}
    tensors = {}
    with ExitStack() as stack:
        for m in (gen, ema, disc):
            stack.enter_context(fsdp.FullyShardedDataParallel.summon_full_params(m, writeback=False, rank0_only=True))
        if rank == 0:
            for name, m in (("gen", gen), ("ema", ema), ("disc", disc)):
                for k, v in m.named_parameters():
                    tensors[f"{name}.{k.replace('_fsdp_wrapped_module.', '')}"] = v.detach().clone()
    optim = {
        "gen": fsdp.FullyShardedDataParallel.full_optim_state_dict(gen, g_opt),
        "disc": fsdp.FullyShardedDataParallel.full_optim_state_dict(disc, d_opt),
    }
    if rank == 0:
        os.makedirs(args.out, exist_ok=True)
        save_file(tensors, f"{args.out}/params.safetensors")
        flat = {
            f"{k}/{model}.{name}": v.clone()
            for model, state in optim.items()
            for name, s in state["state"].items()
            for k, v in s.items()
        }
        save_file(flat, f"{args.out}/optimizer.safetensors")
        with open(f"{args.out}/figures.json", "w") as f:
            json.dump(figures, f, indent=1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
