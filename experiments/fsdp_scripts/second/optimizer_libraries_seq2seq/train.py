"""A small nn.Transformer that reverses sentences, sharded with fully_shard and trained by optimizers of other libraries."""

import argparse
import json
import math
from pathlib import Path

import optimi
import pytorch_optimizer
import schedulefree
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from muon_fsdp2 import Muon as Fsdp2Muon
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

VOCAB, DIM, PAD, BOS = 96, 48, 0, 1


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM, padding_idx=PAD)
        nn.init.normal_(self.embed.weight[1:], std=0.15)
        self.positions = nn.Parameter(torch.randn(1, 24, DIM) * 0.02)
        self.transformer = nn.Transformer(
            DIM, 4, 2, 2, 2 * DIM, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.generator = nn.Linear(DIM, VOCAB, bias=False)
        self.generator.weight = self.embed.weight

    def forward(self, source, target):
        empty = source == PAD
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1]).isinf()
        source, target = (self.embed(ids) * 4 + self.positions[:, : ids.shape[1]] for ids in (source, target))
        hidden = self.transformer(
            source, target, tgt_mask=mask, src_key_padding_mask=empty, memory_key_padding_mask=empty
        )
        return self.generator(hidden)


def batch(seed, size=8):
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(6, 17, (size,), generator=rng)
    source, target = torch.full((size, 16), PAD), torch.full((size, 17), PAD)
    target[:, 0] = BOS
    for i, n in enumerate(lengths.tolist()):
        source[i, :n] = torch.randint(2, 20, (n,), generator=rng)
        target[i, 1 : n + 1] = source[i, :n].flip(0) + 30
    return source, target


def make_optimizer(name, model, gradient_release):
    inner = [q for q in model.transformer.parameters() if q.ndim == 2]
    chosen = {id(q) for q in inner}
    rest = [q for q in model.parameters() if id(q) not in chosen]
    if name == "schedulefree":
        return schedulefree.AdamWScheduleFree(model.parameters(), lr=6e-3, warmup_steps=2, weight_decay=0.01)
    if name == "stableadamw":
        return optimi.StableAdamW(
            optimi.param_groups_weight_decay(model, 0.02), lr=4e-3, gradient_release=gradient_release
        )
    if name == "lion":
        return optimi.Lion(
            model.parameters(), lr=6e-4, decouple_lr=True, weight_decay=1e-5, gradient_release=gradient_release
        )
    if name == "adan":
        return pytorch_optimizer.Adan(model.parameters(), lr=3e-3, max_grad_norm=1.0)
    if name == "muon":
        groups = [
            {"params": inner, "lr": 0.02, "weight_decay": 0.01, "use_muon": True},
            {"params": rest, "lr": 4e-3, "betas": (0.9, 0.95), "weight_decay": 0.0, "use_muon": False},
        ]
        return pytorch_optimizer.Muon(groups, foreach=False)
    if name == "adamuon":
        groups = [
            {"params": inner, "lr": 2e-3, "weight_decay": 0.01, "use_muon": True},
            {"params": rest, "lr": 4e-3, "betas": (0.9, 0.95), "weight_decay": 0.0, "use_muon": False},
        ]
        return pytorch_optimizer.AdaMuon(groups)
    groups = [{"params": inner, "lr": 4e-3, "use_muon": True}, {"params": rest, "lr": 4e-3, "use_muon": False}]
    return Fsdp2Muon(groups)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("out", type=Path)
    p.add_argument("--steps", type=int, default=6)
    p.add_argument(
        "--optimizer",
        choices=["schedulefree", "stableadamw", "lion", "adan", "muon", "adamuon", "muon-fsdp2"],
        default="schedulefree",
    )
    p.add_argument("--gradient-release", action="store_true", help="step each parameter during the backward")
    p.add_argument("--bf16", action="store_true", help="bfloat16 compute, float32 weights")
    p.add_argument("--pure-bf16", action="store_true", help="bfloat16 weights; optimi then uses Kahan summation")
    p.add_argument("--offload", action="store_true")
    p.add_argument("--save", action="store_true")
    p.add_argument("--load", type=Path)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (world,))
    torch.compiler.set_stance("force_eager")  # no compiler on the training machines

    torch.manual_seed(41)
    model = Translator()
    if args.pure_bf16:
        model.to(torch.bfloat16)
    options = {"mesh": mesh, "offload_policy": CPUOffloadPolicy(pin_memory=False) if args.offload else OffloadPolicy()}
    if args.bf16:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in [*model.transformer.encoder.layers, *model.transformer.decoder.layers]:
        fully_shard(block, **options)
    fully_shard(model.transformer, **options, reshard_after_forward=False)
    fully_shard(model, **options)
    optimizer = make_optimizer(args.optimizer, model, args.gradient_release)
    if args.gradient_release:
        optimi.prepare_for_gradient_release(model, optimizer)
    scheduled = args.optimizer not in ("schedulefree", "muon-fsdp2")
    scheduler = None
    if scheduled:
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda s: min(1.0, (s + 1) / 2) * (1 + math.cos(math.pi * s / 12)) / 2
        )
    start = 0
    if args.load:
        set_model_state_dict(model, load_weights(model, args.load / "checkpoint" / "weights"))
        state = torch.load(args.load / "checkpoint" / f"optimizer_{rank}.pt", weights_only=False)
        optimizer.load_state_dict(state["optimizer"])
        if scheduler:
            scheduler.load_state_dict(state["scheduler"])
        start = state["step"]

    def loss_of(source, target, smoothing=0.1):
        logits = model(source, target[:, :-1]).float()
        return F.cross_entropy(
            logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD, label_smoothing=smoothing
        )

    def averaged(value):
        value = value.detach().clone()
        dist.all_reduce(value)
        return value.item() / world

    figures = {"losses": [], "grad_norms": [], "lr": [], "eval": []}
    for step in range(start, args.steps):
        model.train()
        if args.optimizer == "schedulefree":
            optimizer.train()
        loss = loss_of(*batch(step * world + rank))
        loss.backward()
        if not args.gradient_release:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            figures["grad_norms"].append(norm.full_tensor().item())
        optimizer.step()  # with gradient release this moves only the counters on
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()
        figures["losses"].append(averaged(loss))
        figures["lr"].append([group["lr"] for group in optimizer.param_groups])
        if step % 2:
            model.eval()
            if args.optimizer == "schedulefree":
                optimizer.eval()
            with torch.no_grad():
                figures["eval"].append(averaged(loss_of(*batch(777 + rank), smoothing=0.0)))
            for unit in model.modules():
                if isinstance(unit, FSDPModule):
                    unit.reshard()
    if args.optimizer == "schedulefree":
        # The averaged weights are the ones to keep; a run that goes on starts from the training weights.
        optimizer.eval()
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    args.out.mkdir(parents=True, exist_ok=True)
    if args.save:
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=args.out / "checkpoint" / "weights")
        state = {"optimizer": optimizer.state_dict(), "step": args.steps}
        if scheduler:
            state["scheduler"] = scheduler.state_dict()
        torch.save(state, args.out / "checkpoint" / f"optimizer_{rank}.pt")
    names = {q: n for n, q in model.named_parameters()}
    moments = {}
    for q, entry in optimizer.state.items():
        for key, value in entry.items():
            if isinstance(value, torch.Tensor):
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                moments[f"{key}/{names[q]}"] = whole.contiguous()
    if rank == 0:
        figures["state"] = {
            k: type(v).__name__ for k, v in optimizer.state[model.transformer.encoder.norm.weight].items()
        }
        (args.out / "figures.json").write_text(json.dumps(figures, indent=1))
        full.pop("generator.weight", None)  # the same tensor as embed.weight
        save_file({k: v.contiguous() for k, v in full.items()}, args.out / "params.safetensors")
        save_file(moments, args.out / "optimizer.safetensors")
    dist.barrier()
    dist.destroy_process_group()


def load_weights(model, path):
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=path)
    return state["model"]


if __name__ == "__main__":
    main()
