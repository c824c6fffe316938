"""A character model wrapped by hand in nested units, with meta-device init and a sharded teacher."""

import argparse
import json
import os
import string

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import enable_wrap, wrap
from torch.nn import functional as F

VOCABULARY = string.ascii_lowercase + " .,"


class Mixer(nn.Module):
    """A gated causal convolution over the last characters."""

    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.conv = nn.Conv1d(dim, 2 * dim, 4)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        y = F.pad(self.norm(x).transpose(1, 2), (3, 0))
        value, gate = self.conv(y).transpose(1, 2).chunk(2, dim=-1)
        return x + self.out(value * torch.sigmoid(gate))


class Experts(nn.Module):
    """Two feed-forward experts with a soft gate. Each expert is a unit of its own."""

    def __init__(self, dim):
        super().__init__()
        self.gate = nn.Linear(dim, 2)
        self.experts = nn.ModuleList(
            wrap(nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim)))
            for _ in range(2)
        )
        self.register_buffer("temperature", torch.full((), 2.0))

    def forward(self, x):
        weights = torch.softmax(self.gate(x) / self.temperature, dim=-1)
        return x + sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))

    def reset_parameters(self):
        self.temperature.fill_(2.0)


class CharModel(nn.Module):
    def __init__(self, dim, depth, tied):
        super().__init__()
        self.embed = nn.Embedding(len(VOCABULARY), dim)
        self.blocks = nn.ModuleList()
        for _ in range(depth):
            self.blocks.append(wrap(Mixer(dim)))
            self.blocks.append(wrap(Experts(dim)))
        self.head = nn.Linear(dim, len(VOCABULARY), bias=False)
        self.scale = dim**-0.5 if tied else 1.0
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def materialize(module):
    """Called by FSDP for the modules of a unit on the meta device."""
    module.to_empty(device="cpu", recurse=False)
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def build(args, groups, dim, depth):
    precision = {
        "fp32": None,
        "bf16": MixedPrecision(torch.bfloat16, torch.float32, torch.float32, cast_root_forward_inputs=True),
        "bf16_params": MixedPrecision(param_dtype=torch.bfloat16),
    }[args.precision]
    settings = {
        "sharding_strategy": ShardingStrategy[args.strategy],
        "mixed_precision": precision,
        "backward_prefetch": BackwardPrefetch[args.prefetch] if args.prefetch else None,
        "limit_all_gathers": args.limit,
        "use_orig_params": args.orig_params,
        "device_id": torch.device("cpu"),
        "param_init_fn": materialize if args.meta else None,
        "process_group": groups,
    }
    with enable_wrap(wrapper_cls=FSDP, **settings), torch.device("meta" if args.meta else "cpu"):
        return wrap(CharModel(dim, depth, tied=args.tied))


def text(n, generator):
    """Sentences of a few made-up words."""
    words = ["".join(VOCABULARY[i] for i in torch.randint(0, 26, (4,), generator=generator)) for _ in range(6)]
    lines = []
    for _ in range(n):
        order = torch.randint(0, 6, (5,), generator=generator).tolist()
        line = " ".join(words[i] for i in order) + "."
        lines.append([VOCABULARY.index(c) for c in line])
    return torch.tensor(lines)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("out")
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--strategy", default="FULL_SHARD")
    p.add_argument("--precision", choices=["fp32", "bf16", "bf16_params"], default="fp32")
    p.add_argument("--prefetch", default="BACKWARD_PRE")
    p.add_argument("--limit", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--orig-params", action="store_true")
    p.add_argument("--meta", action="store_true")
    p.add_argument("--tied", action="store_true")
    p.add_argument("--teacher", action="store_true")
    p.add_argument("--optimizer", choices=["sgd", "adam", "adagrad"], default="adam")
    p.add_argument("--freeze-embedding", action="store_true")
    p.add_argument("--save", action="store_true")
    p.add_argument("--load")
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    sharding_groups = None
    if args.strategy == "HYBRID_SHARD":
        # Shard within pairs of neighbours, replicate across the pairs.
        within, _ = dist.new_subgroups(2)
        across, _ = dist.new_subgroups_by_enumeration([list(range(i, world, 2)) for i in range(2)])
        sharding_groups = (within, across)
    torch.manual_seed(8)
    model = build(args, sharding_groups, dim=48, depth=2)
    teacher = build(args, sharding_groups, dim=64, depth=2).eval().requires_grad_(False) if args.teacher else None
    if args.freeze_embedding:
        model.module.embed.weight.requires_grad_(False)

    decay, plain = [], []
    for q in model.parameters():
        if q.requires_grad:
            (decay if q.ndim > 1 else plain).append(q)
    groups = [{"params": g, "weight_decay": d} for g, d in ((decay, 0.1), (plain, 0.0)) if g]
    make = {
        "sgd": lambda: torch.optim.SGD(groups, lr=0.2, momentum=0.9, nesterov=True),
        "adam": lambda: torch.optim.AdamW(groups, lr=5e-3, amsgrad=True),
        "adagrad": lambda: torch.optim.Adagrad(groups, lr=2e-2),
    }
    optimizer = make[args.optimizer]()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=[2e-2] * len(groups), total_steps=12, cycle_momentum=False
    )

    start = 0
    if args.load:
        state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer), "step": 0}
        state["scheduler"] = scheduler.state_dict()
        dcp.load(state, checkpoint_id=f"{args.load}/checkpoint")
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optim"])
        scheduler.load_state_dict(state["scheduler"])
        start = state["step"]

    data = text(96, torch.Generator().manual_seed(4))
    figures = {"loss": [], "grad_norm": [], "inf_norm": [], "lr": [], "eval": []}
    for step in range(start, args.steps):
        rows = [(step * world + rank) * 4 % 80 + i for i in range(4)]
        ids = data[rows]
        logits = model(ids[:, :-1]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        if teacher is not None:
            with torch.no_grad():
                wanted = torch.softmax(teacher(ids[:, :-1]).float(), -1)
            loss = 0.7 * loss + 0.3 * F.kl_div(torch.log_softmax(logits, -1), wanted, reduction="batchmean") / 20
        optimizer.zero_grad()
        loss.backward()
        figures["inf_norm"].append(model.clip_grad_norm_(1e6, norm_type=float("inf")).item())
        figures["grad_norm"].append(model.clip_grad_norm_(1.0).item())
        figures["lr"].append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.SUM)
        figures["loss"].append((mean / world).item())
        if step % 3 == 2:
            model.eval()
            with torch.no_grad():
                held = F.cross_entropy(model(data[80:, :-1]).float().flatten(0, 1), data[80:, 1:].flatten())
            figures["eval"].append(held.item())
            model.train()

    if args.save:
        state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
        state.update(step=args.steps, scheduler=scheduler.state_dict())
        dcp.save(state, checkpoint_id=f"{args.out}/checkpoint")

    figures["units"] = [name for name, m in model.named_modules() if isinstance(m, FSDP)]
    figures["local_shapes"] = [list(q.shape) for q in model.parameters()]
    with FSDP.summon_full_params(model, writeback=False, with_grads=args.orig_params):
        figures["full_shapes"] = {n: list(q.shape) for n, q in model.named_parameters()}
        if args.orig_params:
            figures["grads"] = {n: q.grad.abs().sum().item() for n, q in model.named_parameters() if q.grad is not None}
    options = StateDictOptions(full_state_dict=True)
    weights = get_model_state_dict(model, options=options)
    optim = get_optimizer_state_dict(model, optimizer, options=options)
    if rank == 0:
        os.makedirs(args.out, exist_ok=True)
        save_file({k: v.clone() for k, v in weights.items()}, f"{args.out}/params.safetensors")
        flat = {f"{k}/{name}": torch.as_tensor(v).clone() for name, s in optim["state"].items() for k, v in s.items()}
        save_file(flat, f"{args.out}/optimizer.safetensors")
        with open(f"{args.out}/figures.json", "w") as f:
            json.dump(figures, f, indent=1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
