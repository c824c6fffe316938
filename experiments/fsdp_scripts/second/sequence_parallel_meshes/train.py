"""One language model on two-dimensional meshes: tensor + sequence parallel, Ulysses, or DTensors on the whole mesh."""

import argparse
import contextlib
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

VOCAB, DIM, HEAD, SEQ = 160, 48, 12, 24


class SeqAllToAll(nn.Module):
    """Exchange the split of the sequence for a split of the heads, and back."""

    def __init__(self, group):
        super().__init__()
        self.group, self.size = group, group.size()

    def forward(self, x, *, gather_sequence):
        dims = (2, 1) if gather_sequence else (1, 2)  # batch x sequence x heads x HEAD
        parts = torch.stack(x.chunk(self.size, dim=dims[0])).contiguous()
        swapped = funcol.all_to_all_single_autograd(parts, None, None, self.group)
        return torch.cat(list(swapped), dim=dims[1])


def attend(q, k, v):
    """Causal attention of batch x sequence x heads x HEAD; DTensors are split in batch and heads only."""
    if isinstance(q, DTensor):
        y = attend(*(t.to_local() for t in (q, k, v)))
        return DTensor.from_local(y, q.device_mesh, q.placements)
    return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.wo = nn.Linear(DIM, DIM, bias=False)
        self.exchange = None

    def forward(self, x, positions):
        q, k, v = (w(x).unflatten(-1, (-1, HEAD)) for w in (self.wq, self.wk, self.wv))
        q, k = q + positions, k + positions
        if self.exchange is not None:
            q, k, v = (self.exchange(t, gather_sequence=True) for t in (q, k, v))
        y = attend(q, k, v)
        if self.exchange is not None:
            y = self.exchange(y, gather_sequence=False)
        return self.wo(y.flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(DIM, 2 * DIM, bias=False)
        self.w2 = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM, eps=1e-5), nn.RMSNorm(DIM, eps=1e-5)
        self.attention, self.ffn = Attention(), FeedForward()

    def forward(self, x, positions):
        x = x + self.attention(self.attention_norm(x), positions)
        return x + self.ffn(self.ffn_norm(x))


class Model(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(depth)})
        self.norm, self.head = nn.RMSNorm(DIM, eps=1e-5), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids, positions):
        x = self.embed(ids)
        for layer in self.layers.values():
            x = layer(x, positions)
        return self.head(self.norm(x))


def tensor_and_sequence_parallel(model, mesh):
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    for layer in model.layers.values():
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "ffn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "ffn.w1": ColwiseParallel(),
            "ffn.w3": ColwiseParallel(),
            "ffn.w2": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh, plan)


def spread_over_whole_mesh(model, mesh, split):
    """Every parameter becomes a DTensor on all dimensions of the mesh."""
    for module_name, module in model.named_modules():
        for name, param in list(module.named_parameters(recurse=False)):
            placements = [Replicate()] * mesh.ndim
            leaf = module_name.split(".")[-1]
            if split and leaf in ("wq", "wk", "wv", "w1", "w3"):
                placements[-1] = Shard(0)
            elif split and leaf in ("wo", "w2"):
                placements[-1] = Shard(1)
            module.register_parameter(name, nn.Parameter(distribute_tensor(param.detach(), mesh, placements)))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("out", type=Path)
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--style", choices=["tp-sp", "ulysses", "spmd"], default="tp-sp")
    p.add_argument("--inner", type=int, default=2, help="size of the tensor or sequence parallel dimension")
    p.add_argument("--dp", choices=["shard", "hybrid", "replicate"], default="shard", help="for the style spmd")
    p.add_argument("--bf16", action="store_true")
    p.add_argument("--ac", action="store_true")
    p.add_argument("--no-loss-parallel", action="store_true")
    p.add_argument("--reshard", choices=["default", "always", "never"], default="default")
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--save", action="store_true")
    p.add_argument("--load", type=Path)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    hybrid = args.style == "spmd" and args.dp == "hybrid"
    names = ("outer", "dp") if hybrid else ("dp", "inner")
    mesh = init_device_mesh("cpu", (world // args.inner, args.inner), mesh_dim_names=names)
    batch_rank, batch_ranks = (rank, world) if hybrid else (mesh["dp"].get_local_rank(), mesh["dp"].size())

    torch.manual_seed(11)
    model = Model()
    options = {"mp_policy": MixedPrecisionPolicy()}
    if args.bf16:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=True)
    if args.reshard != "default":
        options["reshard_after_forward"] = args.reshard == "always"
    if args.style == "tp-sp":
        tensor_and_sequence_parallel(model, mesh["inner"])
        options["mesh"] = mesh["dp"]
    elif args.style == "ulysses":
        for layer in model.layers.values():
            layer.attention.exchange = SeqAllToAll(mesh["inner"].get_group())
        options["mesh"] = mesh["dp", "inner"]._flatten("dp_inner")
    else:
        spread_over_whole_mesh(model, mesh, split=not hybrid)
        dims = {
            "shard": {"shard": "dp"},
            "hybrid": {"shard": "dp", "replicate": "outer"},
            "replicate": {"replicate": "dp"},
        }
        options |= {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(**dims[args.dp])}
    for name, layer in model.layers.items():
        if args.ac:
            model.layers[name] = layer = checkpoint_wrapper(layer)
        fully_shard(layer, **options)
    fully_shard(model, **options)

    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 3))
    start = 0
    if args.load:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "scheduler": warmup.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=args.load / "checkpoint")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        warmup.load_state_dict(state["scheduler"])
        start = state["step"]

    table = torch.randn(SEQ, 1, HEAD, generator=torch.Generator().manual_seed(5)) * 0.3

    def batch(step):
        rng = torch.Generator().manual_seed(step * batch_ranks + batch_rank)
        begin, pace = torch.randint(0, VOCAB, (4, 1), generator=rng), torch.randint(1, 5, (4, 1), generator=rng)
        ids = (begin + pace * torch.arange(SEQ + 1)) % VOCAB
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def loss_of(step):
        ids, labels = batch(step)
        positions = table.to(torch.bfloat16) if args.bf16 else table
        if args.style == "ulysses":
            here, size = mesh["inner"].get_local_rank(), mesh["inner"].size()
            ids, labels, positions = ids.chunk(size, 1)[here], labels.chunk(size, 1)[here], positions.chunk(size)[here]
        elif args.style == "spmd":
            placements = [Shard(0), Shard(0)] if hybrid else [Shard(0), Replicate()]
            ids = DTensor.from_local(ids, mesh, placements)
            positions = distribute_tensor(positions, mesh, [Replicate(), Replicate()])
        logits = model(ids, positions)
        if args.style == "spmd":
            logits = logits.redistribute(placements=placements).to_local()
        elif args.style == "tp-sp" and args.no_loss_parallel:
            logits = logits.redistribute(placements=[Replicate()]).to_local()
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    parallel_loss = args.style == "tp-sp" and not args.no_loss_parallel
    figures = {"losses": [], "grad_norms": [], "lr": []}
    for step in range(start, args.steps):
        with loss_parallel() if parallel_loss else contextlib.nullcontext():
            loss = loss_of(step)
            loss.backward()
        norm = nn.utils.get_total_norm([q.grad for q in model.parameters()])
        nn.utils.clip_grads_with_norm_(model.parameters(), args.clip, norm)
        optimizer.step()
        optimizer.zero_grad()
        warmup.step()
        value = loss.detach().full_tensor() if isinstance(loss, DTensor) else loss.detach()
        dist.all_reduce(value)
        figures["losses"].append(value.item() / world)
        figures["grad_norms"].append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        figures["lr"].append(warmup.get_last_lr()[0])

    if args.save:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "scheduler": warmup.state_dict(), "step": args.steps}
        dcp.save(state, checkpoint_id=args.out / "checkpoint")
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = get_state_dict(model, optimizer, options=full)
    figures["units"] = [n for n, m in model.named_modules() if isinstance(m, FSDPModule)]
    figures["placements"] = {n: str(q.placements) for n, q in model.named_parameters()}
    figures["local_shapes"] = {n: list(q.to_local().shape) for n, q in model.named_parameters()}
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "figures.json").write_text(json.dumps(figures, indent=1))
        save_file({k: v.contiguous() for k, v in weights.items()}, args.out / "params.safetensors")
        flat = {f"{s}/{n}": t.contiguous() for n, entry in moments["state"].items() for s, t in entry.items()}
        save_file(flat, args.out / "optimizer.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
