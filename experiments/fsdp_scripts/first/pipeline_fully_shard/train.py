"""Pipeline stages of torch.distributed.pipelining with fully_shard inside each stage."""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

VOCAB, DIM, LAYERS, SEQ = 300, 48, 4, 24
SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}


class Part(nn.Module):
    """Some layers of the model under their global names; the first part embeds, the last one projects."""

    def __init__(self, first, last, numbers):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM) if first else None
        self.layers = nn.ModuleDict(
            {
                str(i): nn.TransformerEncoderLayer(
                    DIM, 4, 2 * DIM, dropout=0.0, activation=F.gelu, batch_first=True, norm_first=True
                )
                for i in numbers
            }
        )
        self.norm = nn.LayerNorm(DIM) if last else None
        self.head = nn.Linear(DIM, VOCAB, bias=False) if last else None

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        for layer in self.layers.values():
            x = layer(x, src_mask=mask, is_causal=True)
        return x if self.head is None else self.head(self.norm(x))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("out", type=Path)
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--schedule", choices=list(SCHEDULES), default="gpipe")
    p.add_argument("--micro", type=int, default=4)
    p.add_argument("--bf16", action="store_true")
    p.add_argument("--reshard", action="store_true", help="free the parameters after each forward")
    p.add_argument("--foreach", action="store_true")
    p.add_argument("--save", action="store_true")
    p.add_argument("--load", type=Path)
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "dp"))
    pp_rank, dp_rank, dp_size = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank(), mesh["dp"].size()
    looped = args.schedule in ("interleaved", "zero-bubble")
    stages_in_all = 4 if looped else 2
    inner, outer = MixedPrecisionPolicy(), MixedPrecisionPolicy()
    if args.bf16:
        inner = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        outer = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)

    stages, parts = [], []
    per_stage = LAYERS // stages_in_all
    for index in range(pp_rank, stages_in_all, 2):
        torch.manual_seed(100 + index)
        part = Part(index == 0, index == stages_in_all - 1, range(index * per_stage, (index + 1) * per_stage))
        for layer in part.layers.values():
            fully_shard(layer, mesh=mesh["dp"], mp_policy=inner, reshard_after_forward=args.reshard)
        fully_shard(part, mesh=mesh["dp"], mp_policy=outer, reshard_after_forward=args.reshard)
        parts.append(part)
        stages.append(PipelineStage(part, index, stages_in_all, torch.device("cpu"), group=mesh["pp"].get_group()))

    def loss_fn(logits, labels):
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    make = SCHEDULES[args.schedule]
    schedule = make(stages if looped else stages[0], n_microbatches=args.micro, loss_fn=loss_fn)
    params = [q for part in parts for q in part.parameters()]
    optimizers = [torch.optim.AdamW(part.parameters(), lr=3e-3, foreach=args.foreach) for part in parts]
    start = 0
    if args.load:
        state = {}
        for part, optimizer in zip(parts, optimizers):
            state |= {f"model.{n}": v for n, v in get_model_state_dict(part).items()}
            flat = StateDictOptions(flatten_optimizer_state_dict=True)
            state |= {f"optim.{n}": v for n, v in get_optimizer_state_dict(part, optimizer, options=flat).items()}
        dcp.load(state, checkpoint_id=args.load / "checkpoint")
        for part, optimizer in zip(parts, optimizers):
            own = get_model_state_dict(part)
            set_model_state_dict(part, {n: state[f"model.{n}"] for n in own})
            keys = get_optimizer_state_dict(part, optimizer, options=flat)
            set_optimizer_state_dict(part, optimizer, {n: state[f"optim.{n}"] for n in keys}, options=flat)
        start = json.loads((args.load / "figures.json").read_text())["steps"]

    figures = {"losses": [], "grad_norms": [], "steps": args.steps}
    first, last = pp_rank == 0, pp_rank == 1
    for step in range(start, args.steps):
        rng = torch.Generator().manual_seed(step * dp_size + dp_rank)
        begin, hop = torch.randint(0, VOCAB, (2, 8, 1), generator=rng)
        ids = (begin + (1 + hop % 9) * torch.arange(SEQ + 1)) % VOCAB
        inputs, labels = ids[:, :-1], ids[:, 1:]
        losses = []
        if first:
            schedule.step(inputs)
        else:
            schedule.step(target=labels, losses=losses)
        # The norm over all stages: first within the stages of a rank, then over the pipeline.
        total = nn.utils.get_total_norm([q.grad for q in params if q.grad is not None]).full_tensor() ** 2
        dist.all_reduce(total, group=mesh["pp"].get_group())
        total = total.sqrt()
        nn.utils.clip_grads_with_norm_(params, 1.0, total)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        value = torch.stack(losses).mean().detach() if last else torch.zeros(())
        dist.all_reduce(value)
        figures["losses"].append(value.item() / dp_size)
        figures["grad_norms"].append(total.item())

    if args.save:
        state = {}
        for part, optimizer in zip(parts, optimizers):
            state |= {f"model.{n}": v for n, v in get_model_state_dict(part).items()}
            flat = StateDictOptions(flatten_optimizer_state_dict=True)
            state |= {f"optim.{n}": v for n, v in get_optimizer_state_dict(part, optimizer, options=flat).items()}
        dcp.save(state, checkpoint_id=args.out / "checkpoint")

    # Every rank gathers its stages in full; rank 0 puts the stages together.
    weights, moments = {}, {}
    for part, optimizer in zip(parts, optimizers):
        weights |= {n: v.full_tensor() for n, v in get_model_state_dict(part).items()}
        for n, d in get_optimizer_state_dict(part, optimizer)["state"].items():
            moments |= {f"{s}/{n}": t.full_tensor() if hasattr(t, "full_tensor") else t for s, t in d.items()}
    units = [n for part in parts for n, m in part.named_modules() if isinstance(m, FSDPModule)]
    everything = [None] * world
    dist.all_gather_object(everything, (weights, moments, units))
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        figures["units"] = [names for _, _, names in everything]
        (args.out / "figures.json").write_text(json.dumps(figures, indent=1))
        save_file({n: v.contiguous() for w, _, _ in everything for n, v in w.items()}, args.out / "params.safetensors")
        full = {n: v.contiguous() for _, m, _ in everything for n, v in m.items()}
        save_file(full, args.out / "optimizer.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
