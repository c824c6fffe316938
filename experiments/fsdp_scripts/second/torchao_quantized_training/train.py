"""Training with torchao's tensor subclasses under fully_shard: float8 or 2-bit all-gathers, int8 weights, low-bit Adam."""

import argparse
import json
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
from torchao.prototype.quantized_training import (
    bitnet_training,
    int8_mixed_precision_training,
    int8_weight_only_quantized_training,
    precompute_bitnet_scale_for_fsdp,
)
from torchao.quantization import quantize_

VOCAB, DIM, SEQ = 192, 64, 32
OPTIMIZERS = {"adamw": torch.optim.AdamW, "adamw8bit": AdamW8bit, "adamw4bit": AdamW4bit, "adamwfp8": AdamWFp8}


class Layer(nn.Module):
    def __init__(self, keep=False):
        super().__init__()
        self.keep = keep
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.gate, self.up = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(DIM, 2 * DIM, bias=False)
        self.down = nn.Linear(2 * DIM, DIM, bias=False)

    def attend(self, x):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def mix(self, x):
        h = self.norm2(x)
        return self.down(F.silu(self.gate(h)) * self.up(h))

    def forward(self, x):
        x = x + self.attend(x)
        if self.keep:
            return x + checkpoint(self.mix, x, use_reentrant=False, context_fn=partial(contexts))
        return x + self.mix(x)


def contexts():
    """Recompute everything but the outputs of matrix products."""
    keep = {torch.ops.aten.mm.default, torch.ops.aten._int_mm.default}

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Model(nn.Module):
    def __init__(self, depth, keep):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.Sequential(*(Layer(keep) for _ in range(depth)))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        return self.head(self.norm(self.layers(self.embed(ids))))


def plain(tensor):
    """The values of a DTensor or a subclass as one whole ordinary tensor."""
    if isinstance(tensor, DTensor):
        local = plain(tensor.to_local().detach())
        whole = DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
        )
        return whole.full_tensor()
    for name in ("_tensor", "_data"):
        if type(tensor) is not torch.Tensor and hasattr(tensor, name):
            return getattr(tensor, name).detach()
    return tensor.dequantize() if hasattr(tensor, "dequantize") and type(tensor) is not torch.Tensor else tensor


def main():
    p = argparse.ArgumentParser()
    p.add_argument("out", type=Path)
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--scheme", choices=["float8", "int8", "int8-weights", "bitnet", "none"], default="float8")
    p.add_argument("--fp8-all-gather", action="store_true")
    p.add_argument("--precompute", action="store_true", help="scales of all weights in one all-reduce after each step")
    p.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw")
    p.add_argument("--bf16-weights", action="store_true", help="keep the sharded weights in bfloat16 too")
    p.add_argument("--stochastic-rounding", action="store_true")
    p.add_argument("--ac", action="store_true")
    p.add_argument("--accumulate", type=int, default=1)
    p.add_argument("--clip", type=float)
    p.add_argument("--save", action="store_true")
    p.add_argument("--load", type=Path)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.compiler.set_stance("force_eager")  # torchao compiles the steps of its optimizers; no compiler here
    mesh = init_device_mesh("cpu", (world,))

    torch.manual_seed(23)
    model = Model(2, args.ac)
    if args.bf16_weights:
        model.to(torch.bfloat16)
    if args.scheme == "float8":
        # Without float8 hardware the products are emulated.
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=args.fp8_all_gather, emulate=True)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name != "head")
    elif args.scheme != "none":
        schemes = {
            "int8": int8_mixed_precision_training,
            "int8-weights": int8_weight_only_quantized_training,
            "bitnet": bitnet_training,
        }
        quantize_(model.layers, schemes[args.scheme]())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)

    extra = {"bf16_stochastic_round": True} if args.stochastic_rounding else {}
    optimizer = OPTIMIZERS[args.optimizer](model.parameters(), lr=4e-3, weight_decay=0.01, **extra)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    start = 0
    if args.load:
        state = torch.load(args.load / "checkpoint" / f"rank{rank}.pt", weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["rng"])
        start = state["step"]
    else:
        torch.manual_seed(100 + rank)  # stochastic rounding draws other numbers on every rank

    def batch(seed):
        rng = torch.Generator().manual_seed(seed)
        begin, pace = torch.randint(0, VOCAB, (4, 1), generator=rng), torch.randint(1, 6, (4, 1), generator=rng)
        return (begin + pace * torch.arange(SEQ + 1)) % VOCAB

    figures = {"losses": [], "grad_norms": [], "lr": []}
    for step in range(start, args.steps):
        total = torch.zeros(())
        for micro in range(args.accumulate):
            model.set_requires_gradient_sync(micro == args.accumulate - 1)
            ids = batch((step * args.accumulate + micro) * world + rank)
            loss = F.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())
            (loss / args.accumulate).backward()
            total += loss.detach() / args.accumulate
        if args.clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip, foreach=False)
            figures["grad_norms"].append(norm.full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if args.precompute and args.scheme == "float8":
            precompute_float8_dynamic_scale_for_fsdp(model)
        elif args.precompute and args.scheme == "bitnet":
            precompute_bitnet_scale_for_fsdp(model)
        dist.all_reduce(total)
        figures["losses"].append(total.item() / world)
        figures["lr"].append(float(schedule.get_last_lr()[0]))
    model.eval()
    with torch.no_grad():
        ids = batch(4242)
        figures["eval_loss"] = F.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten()).item()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()

    args.out.mkdir(parents=True, exist_ok=True)
    if args.save:
        (args.out / "checkpoint").mkdir(exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        state |= {"rng": torch.get_rng_state(), "step": args.steps}
        torch.save(state, args.out / "checkpoint" / f"rank{rank}.pt")
    names = {param: name for name, param in model.named_parameters()}
    weights = {name: plain(param.detach()).contiguous() for param, name in names.items()}
    moments = {
        f"{key}/{names[param]}": plain(value).contiguous()
        for param, entry in optimizer.state.items()
        for key, value in entry.items()
    }
    kinds = {name: type(param.to_local()).__name__ for param, name in names.items()}
    state_kinds = {
        k: type(getattr(v, "_local_tensor", v)).__name__ for k, v in optimizer.state[model.norm.weight].items()
    }
    big = optimizer.state[model.layers[0].up.weight]
    state_kinds |= {f"big {k}": type(getattr(v, "_local_tensor", v)).__name__ for k, v in big.items()}
    if rank == 0:
        figures |= {"kinds": kinds, "state_kinds": state_kinds}
        (args.out / "figures.json").write_text(json.dumps(figures, indent=1))
        save_file(weights, args.out / "params.safetensors")
        save_file(moments, args.out / "optimizer.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
