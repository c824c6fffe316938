"""Pre-training loop like that of torchtitan: meta device, TP + FSDP2, HSDP, compiled blocks, checkpoints."""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

VOCAB, DIM, HEADS, LAYERS, SEQ = 512, 64, 4, 4, 32


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("wq", "wk", "wv", "wo"):
            setattr(self, name, nn.Linear(DIM, DIM, bias=False))

    def forward(self, x, rope):
        b, t, _ = x.shape
        q, k, v = (w(x).view(b, t, -1, DIM // HEADS) for w in (self.wq, self.wk, self.wv))
        cos, sin = rope[0, :t, None], rope[1, :t, None]
        q, k = (torch.cat([h * cos - g * sin, h * sin + g * cos], -1) for h, g in (q.chunk(2, -1), k.chunk(2, -1)))
        q, k, v = (z.transpose(1, 2).to(v.dtype) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(b, t, -1))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = nn.Linear(DIM, 160, bias=False), nn.Linear(DIM, 160, bias=False)
        self.w2 = nn.Linear(160, DIM, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.std = 0.02 / (2 * (layer + 1)) ** 0.5

    def forward(self, x, rope):
        x = x + self.attention(self.attention_norm(x), rope)
        return x + self.feed_forward(self.ffn_norm(x))

    def init_weights(self):
        for norm in (self.attention_norm, self.ffn_norm):
            norm.reset_parameters()
        for name, linear in [*self.attention.named_children(), *self.feed_forward.named_children()]:
            nn.init.trunc_normal_(linear.weight, std=self.std if name in ("wo", "w2") else 0.02)


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.register_buffer("rope", self.angles(), persistent=False)
        self.layers = nn.ModuleDict({str(i): TransformerBlock(i) for i in range(LAYERS)})
        self.norm = nn.RMSNorm(DIM)
        self.output = nn.Linear(DIM, VOCAB, bias=False)

    def angles(self):
        freqs = 1.0 / 10000 ** (torch.arange(0, DIM // HEADS, 2).float() / (DIM // HEADS))
        table = torch.outer(torch.arange(SEQ).float(), freqs)
        return torch.stack([table.cos(), table.sin()])

    @torch.no_grad()
    def init_weights(self, device):
        with torch.device(device):
            self.rope = self.angles()
        nn.init.normal_(self.tok_embeddings.weight)
        for layer in self.layers.values():
            layer.init_weights()
        self.norm.reset_parameters()
        nn.init.trunc_normal_(self.output.weight, std=DIM**-0.5, a=-3 * DIM**-0.5, b=3 * DIM**-0.5)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.rope)
        return self.output(self.norm(h))


def apply_tp(model, mesh):
    plan = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    for block in model.layers.values():
        gather = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(**gather),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w3": ColwiseParallel(),
        } | {f"attention.{n}": ColwiseParallel() for n in ("wq", "wk", "wv")}
        parallelize_module(block, mesh, plan)


def apply_fsdp(model, mesh, args):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mesh": mesh, "mp_policy": policy if args.bf16 else MixedPrecisionPolicy()}
    if args.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    reshard = {"always": True, "never": False}.get(args.reshard)
    if args.reshard == "partial":
        reshard = 2  # to groups of two ranks
    fully_shard(model.tok_embeddings, **options, reshard_after_forward=reshard)
    for block in model.layers.values():
        fully_shard(block, **options, reshard_after_forward=reshard)
    fully_shard([model.norm, model.output], **options, reshard_after_forward=args.reshard == "always")
    fully_shard(model, **options)
    if args.prefetch:
        chain = [model.tok_embeddings, *model.layers.values(), model.output]
        for this, after in zip(chain, chain[1:]):
            this.set_modules_to_forward_prefetch([after])
        for this, before in zip(chain[::-1], chain[-2::-1]):
            this.set_modules_to_backward_prefetch([before])


class TrainState(Stateful):
    def __init__(self, model, optimizer, scheduler):
        self.model, self.optimizer, self.scheduler, self.step = model, optimizer, scheduler, 0

    def state_dict(self):
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=flat),
            "scheduler": self.scheduler.state_dict(),
            "step": torch.tensor(self.step),
        }

    def load_state_dict(self, state):
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=flat)
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = int(state["step"])


def main():
    p = argparse.ArgumentParser()
    p.add_argument("out", type=Path)
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--tp", type=int, default=1)
    p.add_argument("--replicate", type=int, default=1)
    p.add_argument("--bf16", action="store_true")
    p.add_argument("--offload", action="store_true")
    p.add_argument("--reshard", choices=["default", "always", "never", "partial"], default="default")
    p.add_argument("--prefetch", action="store_true")
    p.add_argument("--ac", action="store_true")
    p.add_argument("--compile", choices=["inductor", "aot_eager"])
    p.add_argument("--fused", action="store_true")
    p.add_argument("--save", choices=["sync", "async"])
    p.add_argument("--load", type=Path)
    args = p.parse_args()

    dist.init_process_group("cpu:gloo")
    world = dist.get_world_size()
    shape = (args.replicate, world // args.replicate // args.tp, args.tp)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    with torch.device("meta"):
        model = Llama()
    if args.tp > 1:
        apply_tp(model, mesh["tp"])
    for name, block in list(model.layers.items()):
        block = checkpoint_wrapper(block, preserve_rng_state=False) if args.ac else block
        if args.compile:
            block = torch.compile(block, fullgraph=True, backend=args.compile)
        model.layers[name] = block
    apply_fsdp(model, mesh["dp_replicate", "dp_shard"] if args.replicate > 1 else mesh["dp_shard"], args)
    assert isinstance(model, FSDPModule)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    model.init_weights("cpu")

    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), fused=args.fused, foreach=False)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 3) * (1 - s / 16))
    state = TrainState(model, optimizer, scheduler)
    if args.load:
        dcp.load({"app": state}, checkpoint_id=args.load / "checkpoint")

    dp_rank = dist.get_rank() // args.tp
    dp_size = world // args.tp
    figures = {"losses": [], "grad_norms": [], "learning_rates": []}
    while state.step < args.steps:
        rng = torch.Generator().manual_seed(100 * state.step + dp_rank)
        start, hop = (torch.randint(0, VOCAB, (4, 1), generator=rng) for _ in range(2))
        ids = (start + (hop % 7) * torch.arange(SEQ + 1)) % VOCAB
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        figures["learning_rates"].append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        average = loss.detach().clone()
        dist.all_reduce(average)
        figures["losses"].append(average.item() / world)
        figures["grad_norms"].append(norm.item())
        state.step += 1

    if args.save:
        path = args.out / "checkpoint"
        if args.save == "async":
            dcp.async_save({"app": state}, checkpoint_id=path).result()
        else:
            dcp.save({"app": state}, checkpoint_id=path)

    figures["data_parallel_size"] = dp_size
    figures["local_shapes"] = {n: list(p.to_local().shape) for n, p in model.named_parameters()}
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state = get_model_state_dict(model, options=full)
    optim_state = get_optimizer_state_dict(model, optimizer, options=full)
    if dist.get_rank() == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "figures.json").write_text(json.dumps(figures, indent=1))
        save_file({k: v.contiguous() for k, v in model_state.items()}, args.out / "params.safetensors")
        flat = {f"{s}/{n}": t.contiguous() for n, d in optim_state["state"].items() for s, t in d.items()}
        save_file(flat, args.out / "optimizer.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
