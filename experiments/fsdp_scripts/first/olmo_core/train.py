"""Pre-train a tiny OLMo-style model with the model and parallelism code of ai2-olmo-core and an own loop."""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from olmo_core.config import DType
from olmo_core.distributed.checkpoint import load_model_and_optim_state, save_model_and_optim_state
from olmo_core.distributed.parallel import DataParallelType, build_world_mesh, get_dp_process_group
from olmo_core.distributed.utils import get_full_tensor, get_local_tensor
from olmo_core.nn.transformer import TransformerConfig, TransformerDataParallelWrappingStrategy
from olmo_core.optim import AdamWConfig, CosWithWarmup, LionConfig, OptimGroupOverride, SkipStepAdamWConfig
from olmo_core.train.train_module.transformer.common import parallelize_model
from olmo_core.train.train_module.transformer.config import (
    TransformerActivationCheckpointingConfig,
    TransformerActivationCheckpointingMode,
    TransformerDataParallelConfig,
    TransformerTensorParallelConfig,
)
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import FSDPModule

VOCAB, SEQ = 320, 32


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("out", type=Path)
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--model", choices=["olmo2", "ngpt"], default="olmo2")
    p.add_argument("--dp", choices=["fsdp", "hsdp"], default="fsdp")
    p.add_argument("--bf16", action="store_true")
    p.add_argument("--wrapping", choices=["full", "blocks", "fine_grained"], default="full")
    p.add_argument("--prefetch", type=int, default=0)
    p.add_argument("--tensor", type=int, default=1)
    p.add_argument("--ac", choices=["full", "selected_modules"])
    p.add_argument("--micro", type=int, default=1, help="micro-batches per step")
    p.add_argument("--optimizer", choices=["adamw", "skipstep", "lion"], default="adamw")
    p.add_argument("--z-loss", type=float, default=None)
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--save", action="store_true")
    p.add_argument("--load", type=Path)
    return p.parse_args()


def build_model(args):
    shape = dict(d_model=64, vocab_size=VOCAB, n_layers=3, n_heads=4, hidden_size_multiple_of=32)
    if args.model == "ngpt":
        config = TransformerConfig.ngpt_like(**shape)
    else:
        config = TransformerConfig.llama_like(qk_norm=True, n_kv_heads=2, **shape)
    config.init_seed = 21
    return config.build(init_device="meta")


def build_optim(args, model):
    embeddings = [OptimGroupOverride(params=["embeddings.weight"], opts=dict(weight_decay=0.0))]
    if args.optimizer == "lion":
        return LionConfig(lr=1e-3, weight_decay=0.1, group_overrides=embeddings).build(model)
    if args.optimizer == "skipstep":
        config = SkipStepAdamWConfig(lr=4e-3, compile=False, rolling_interval_length=4, sigma_factor=2)
        return config.build(model)
    return AdamWConfig(lr=4e-3, weight_decay=0.1, betas=(0.9, 0.95), group_overrides=embeddings).build(model)


def get_batch(step, index, rows):
    rng = torch.Generator().manual_seed(1000 * step + index)
    first = torch.randint(0, VOCAB, (rows, 1), generator=rng)
    gain = torch.randint(2, 5, (rows, 1), generator=rng)
    ids = [first]
    for _ in range(SEQ):
        ids.append((ids[-1] * gain + 1) % VOCAB)
    ids = torch.cat(ids, dim=1)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def main():
    args = parse()
    dist.init_process_group("gloo")
    device = torch.device("cpu")
    dp = TransformerDataParallelConfig(
        name=DataParallelType(args.dp),
        param_dtype=DType.bfloat16 if args.bf16 else None,
        reduce_dtype=DType.float32,
        num_replicas=2 if args.dp == "hsdp" else None,
        wrapping_strategy=TransformerDataParallelWrappingStrategy(args.wrapping),
        prefetch_factor=args.prefetch,
    )
    tp = TransformerTensorParallelConfig(degree=args.tensor) if args.tensor > 1 else None
    ac = None
    if args.ac:
        modules = ["blocks.*.feed_forward"] if args.ac == "selected_modules" else None
        ac = TransformerActivationCheckpointingConfig(
            mode=TransformerActivationCheckpointingMode(args.ac), modules=modules
        )
    mesh = build_world_mesh(dp=dp, tp=tp, device_type="cpu")
    dp_group = get_dp_process_group(mesh)
    dp_rank, dp_size = dist.get_rank(dp_group), dist.get_world_size(dp_group)
    rows = 4
    model = parallelize_model(
        build_model(args),
        world_mesh=mesh,
        device=device,
        max_sequence_length=SEQ,
        rank_microbatch_size=rows * SEQ,
        dp_config=dp,
        tp_config=tp,
        ac_config=ac,
    )
    optim = build_optim(args, model)
    scheduler = CosWithWarmup(warmup=2)
    start = 0
    if args.load:
        load_model_and_optim_state(args.load / "checkpoint", model, optim)
        start = json.loads((args.load / "figures.json").read_text())["steps"]

    def forward(ids, labels, divisor, z_loss=None):
        return model(
            ids,
            labels=labels,
            loss_reduction="sum",
            loss_div_factor=divisor,
            z_loss_multiplier=z_loss,
            return_logits=False,
        )

    figures = {"losses": [], "z_losses": [], "grad_norms": [], "learning_rates": [], "skipped": []}
    for step in range(start, args.steps):
        model.train()
        optim.zero_grad(set_to_none=True)
        total = torch.zeros(())
        z_total = torch.zeros(())
        divisor = torch.tensor(float(rows * SEQ * args.micro))
        for micro in range(args.micro):
            last = micro == args.micro - 1
            if isinstance(model, FSDPModule):
                model.set_is_last_backward(last)
                if args.dp == "hsdp":
                    model.set_requires_all_reduce(last)
            ids, labels = get_batch(step, dp_rank * args.micro + micro, rows)
            _, loss, ce, z = forward(ids, labels, divisor, args.z_loss)
            total += get_local_tensor(ce.detach())
            z_total += 0 if z is None else get_local_tensor(z.detach())
            loss.backward()
        model.post_batch(dry_run=False)
        dist.all_reduce(total, group=dp_group)
        dist.all_reduce(z_total, group=dp_group)
        figures["losses"].append((total / dp_size).item())
        figures["z_losses"].append((z_total / dp_size).item())

        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = get_full_tensor(torch.nn.utils.get_total_norm(grads, norm_type=2.0))
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), args.clip, norm)
        figures["grad_norms"].append(norm.item())
        for group in optim.param_groups:
            group["lr"] = scheduler.get_lr(group["initial_lr"], step + 1, 12)
        figures["learning_rates"].append(float(optim.param_groups[0]["lr"]))
        if args.optimizer == "skipstep":
            optim.latest_loss, optim.latest_grad_norm = total / dp_size, norm
        optim.step()
        if args.optimizer == "skipstep":
            figures["skipped"].append(float(optim.step_skipped))
        model.post_optim_step()

    figures["placements"] = {n: str(p.placements) for n, p in model.named_parameters()}

    model.eval()
    with torch.no_grad():
        ids, labels = get_batch(5000, dp_rank, rows)
        loss = get_local_tensor(forward(ids, labels, torch.tensor(float(rows * SEQ)))[1])
        dist.all_reduce(loss, group=dp_group)
    figures["eval_loss"] = (loss / dp_size).item()
    figures["steps"] = args.steps
    figures["fsdp_modules"] = [n for n, m in model.named_modules() if isinstance(m, FSDPModule)]
    if args.save:
        save_model_and_optim_state(args.out / "checkpoint", model, optim)

    model_state, optim_state = get_state_dict(
        model, optim, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
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
