"""Mixture of experts with fully_shard per block and per expert group, own Muon over DTensors and fine control."""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.distributed._composable.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

VOCAB, DIM, HIDDEN, EXPERTS, SEQ = 256, 48, 64, 4, 24


class Experts(nn.Module):
    """All experts of a layer as two stacked weights, optionally spread over an expert-parallel group."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN) / DIM**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) / HIDDEN**0.5)
        self.group = None

    def spread(self, mesh):
        for name in ("up", "down"):
            setattr(self, name, nn.Parameter(distribute_tensor(getattr(self, name).detach(), mesh, [Shard(0)])))
        self.group = mesh.get_group()

    def forward(self, x, gates):  # tokens x DIM, tokens x EXPERTS
        up, down = self.up, self.down
        if self.group is None:
            hidden = F.gelu(torch.einsum("td,edh->eth", x, up))
            return torch.einsum("eth,ehd,te->td", hidden, down, gates)
        up, down = up.to_local(), down.to_local()
        x = funcol.all_gather_tensor_autograd(x.contiguous(), 0, self.group)
        gates = funcol.all_gather_tensor_autograd(gates.contiguous(), 0, self.group)
        mine = gates.chunk(self.group.size(), dim=1)[self.group.rank()]
        y = torch.einsum("eth,ehd,te->td", F.gelu(torch.einsum("td,edh->eth", x, up)), down, mine)
        return funcol.reduce_scatter_tensor_autograd(y.contiguous(), "sum", 0, self.group)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.mix = nn.GRU(DIM, DIM, batch_first=True)
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x):
        x = x + self.mix(self.norm1(x))[0]
        flat = self.norm2(x).flatten(0, 1)
        scores = self.router(flat).softmax(-1)
        best = scores.topk(2, dim=-1)
        gates = torch.zeros_like(scores).scatter(1, best.indices, best.values)
        load = (gates > 0).float().mean(0)
        balance = (load * scores.float().mean(0)).sum() * EXPERTS
        return x + self.experts(flat, gates).view_as(x), balance


class MoELanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x, balance = self.embed(ids), 0.0
        for block in self.blocks:
            x, extra = block(x)
            balance = balance + extra
        return self.head(self.norm(x)), balance

    def log_likelihood(self, ids):
        logits, _ = self(ids[:, :-1])
        return -F.cross_entropy(logits.float().transpose(1, 2), ids[:, 1:], reduction="none").sum(1)


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonal updates. Each rank computes the update of the whole matrix and keeps its shard."""

    def __init__(self, params, lr=0.01, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(p.grad)
                g = (p.grad + group["momentum"] * buffer).full_tensor()
                x = g / (g.norm(dim=(-2, -1), keepdim=True) + 1e-7)
                for _ in range(5):
                    a = x @ x.mT
                    x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
                update = distribute_tensor(x, p.device_mesh, p.placements)
                p.add_(update, alpha=-group["lr"] * max(1.0, x.shape[-2] / x.shape[-1]) ** 0.5)


def clip(params, limit):
    by_mesh = {}
    for p in params:
        by_mesh.setdefault(p.grad.device_mesh, []).append(p.grad)
    norms = [nn.utils.get_total_norm(grads) for grads in by_mesh.values()]
    total = torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()
    for p in params:
        p.grad.mul_(torch.clamp(limit / (total + 1e-6), max=1.0))
    return total.item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("out", type=Path)
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--ep", type=int, default=1)
    p.add_argument("--bf16", action="store_true")
    p.add_argument("--shard-dim", type=int, default=0, help="dimension along which the experts are sharded")
    p.add_argument("--optimizer", choices=["adamw", "muon", "in-backward"], default="adamw")
    p.add_argument("--accumulate", type=int, default=1)
    p.add_argument("--no-sync", action="store_true", help="reduce gradients at the last micro-batch only")
    p.add_argument("--keep", action="store_true", help="keep parameters unsharded between micro-batches")
    p.add_argument("--early-unshard", action="store_true")
    p.add_argument("--sum", action="store_true", help="sum the gradients over ranks in place of the mean")
    p.add_argument("--clip", type=float)
    p.add_argument("--save", action="store_true")
    p.add_argument("--load", type=Path)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // args.ep, args.ep), mesh_dim_names=("fsdp", "ep"))
    all_mesh = mesh["fsdp", "ep"]._flatten("everyone") if args.ep > 1 else mesh["fsdp"]

    torch.manual_seed(17)
    model = MoELanguageModel()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.bf16 else MixedPrecisionPolicy()
    for block in model.blocks:
        if args.ep > 1:
            block.experts.spread(mesh["ep"])
        placement = (lambda p: Shard(args.shard_dim)) if args.shard_dim else None
        fully_shard(block.experts, mesh=mesh["fsdp"], mp_policy=policy, shard_placement_fn=placement)
        block.experts.set_gradient_divide_factor(float(1 if args.sum else world))
        fully_shard(block, mesh=all_mesh, mp_policy=policy)
        block.set_modules_to_forward_prefetch([block.experts])
        if args.sum:
            block.set_gradient_divide_factor(1.0)
    fully_shard(model, mesh=all_mesh, mp_policy=policy)
    if args.sum:
        model.set_gradient_divide_factor(1.0)
    if args.ep > 1 or args.sum:
        # gloo has no reduction with a factor of its own: sum, and divide apart from it.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(model, "log_likelihood")

    params = dict(model.named_parameters())
    scale = 1 / world if args.sum else 1.0
    if args.optimizer == "in-backward":
        each = {p: torch.optim.SGD([p], lr=0.2 * scale, momentum=0.9, foreach=False) for p in params.values()}

        def update(param):
            each[param].step()
            each[param].zero_grad()

        for param in params.values():
            param.register_post_accumulate_grad_hook(update)
        optimizers = []
    elif args.optimizer == "muon":
        muon = [p for n, p in params.items() if n.startswith("blocks") and p.ndim >= 2]
        rest = [p for n, p in params.items() if not (n.startswith("blocks") and p.ndim >= 2)]
        optimizers = [Muon(muon), torch.optim.AdamW(rest, lr=4e-3, fused=True)]
    else:
        optimizers = [torch.optim.AdamW(params.values(), lr=4e-3, foreach=False)]
    start = 0
    if args.load:
        model_state, optim_state = get_state_dict(model, optimizers)
        state = {"model": model_state, "optim": optim_state, "step": 0}
        dcp.load(state, checkpoint_id=args.load / "checkpoint")
        set_state_dict(model, optimizers, model_state_dict=state["model"], optim_state_dict=state["optim"])
        start = state["step"]

    def batch(seed):
        rng = torch.Generator().manual_seed(seed)
        first, second = torch.randint(0, VOCAB, (2, 4, 1), generator=rng)
        ids = [first, second]
        while len(ids) <= SEQ:
            ids.append((ids[-1] + ids[-2]) % 61)
        return torch.cat(ids, 1)

    figures = {"losses": [], "balance": [], "grad_norms": [], "likelihood": []}
    for step in range(start, args.steps):
        totals = torch.zeros(2)
        for micro in range(args.accumulate):
            last = micro == args.accumulate - 1
            if args.no_sync:
                model.set_requires_gradient_sync(last)
                model.set_is_last_backward(last)
            if args.keep:
                model.set_reshard_after_forward(False)
                model.set_reshard_after_backward(last)
            if args.early_unshard:
                handle = model.unshard(async_op=True)
                model.blocks[0].unshard()
            ids = batch((step * args.accumulate + micro) * world + rank)
            if args.early_unshard and handle is not None:
                handle.wait()
            logits, balance = model(ids[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
            ((loss + 0.01 * balance) / args.accumulate).backward()
            totals += torch.stack([loss.detach(), balance.detach().float()]) / args.accumulate
        if args.sum:
            for p in params.values():
                if p.grad is not None:
                    p.grad.mul_(scale)
        if args.clip is not None:
            figures["grad_norms"].append(clip(params.values(), args.clip))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        dist.all_reduce(totals)
        figures["losses"].append(totals[0].item() / world)
        figures["balance"].append(totals[1].item() / world)
        if step % 2:
            with torch.no_grad():
                figures["likelihood"] += model.log_likelihood(batch(9999)).tolist()
            model.reshard()

    model_state, optim_state = get_state_dict(model, optimizers)
    if args.save:
        state = {"model": model_state, "optim": optim_state, "step": args.steps}
        dcp.save(state, checkpoint_id=args.out / "checkpoint")
    full = {n: p.full_tensor() for n, p in model_state.items()}
    names = [n for n, m in model.named_modules() if isinstance(m, FSDPModule)]
    placements = {n: str(p.placements) for n, p in params.items()}
    if optimizers:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        optim_state = get_state_dict(model, optimizers, options=options)[1].get("state", {})
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        figures |= {"fsdp_modules": names, "placements": placements}
        (args.out / "figures.json").write_text(json.dumps(figures, indent=1))
        save_file({k: v.contiguous() for k, v in full.items()}, args.out / "params.safetensors")
        if optimizers:
            flat = {f"{s}/{n}": t.contiguous() for n, d in optim_state.items() for s, t in d.items()}
            save_file(flat, args.out / "optimizer.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
