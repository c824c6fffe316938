"""Sequence-to-sequence training of a small T5, sharded with FullyShardedDataParallel."""

import argparse
import functools
import json
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

PRECISIONS = {
    "fp32": None,
    "bf16": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16),
    "bf16_reduce32": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("out")
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--strategy", default="FULL_SHARD")
    p.add_argument("--precision", choices=PRECISIONS, default="fp32")
    p.add_argument("--wrap", choices=["block", "size"], default="block")
    p.add_argument("--prefetch", choices=["pre", "post", "none"], default="pre")
    p.add_argument("--forward-prefetch", action="store_true")
    p.add_argument("--orig-params", action="store_true")
    p.add_argument("--checkpointing", action="store_true")
    p.add_argument("--no-limit-all-gathers", action="store_true")
    p.add_argument("--save", choices=["full", "dcp"])
    p.add_argument("--load")
    return p.parse_args()


def copy_task(n, generator):
    """The target is the source read backwards."""
    source = torch.randint(2, 96, (n, 12), generator=generator)
    source[:, -1] = 1
    return TensorDataset(source, torch.cat([source[:, :-1].flip(1), source[:, -1:]], dim=1))


def full_model_state(model):
    # The parameters are on the CPU already, so nothing is offloaded.
    config = FullStateDictConfig(offload_to_cpu=False, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        return model.state_dict()


def save(kind, folder, model, optimizer, scheduler, step):
    os.makedirs(folder, exist_ok=True)
    if kind == "full":
        weights, optim = full_model_state(model), FSDP.full_optim_state_dict(model, optimizer)
        if dist.get_rank() == 0:
            torch.save({"model": weights, "optimizer": optim}, f"{folder}/full.pt")
    else:
        FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        state = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=f"{folder}/sharded")
    if dist.get_rank() == 0:
        torch.save({"scheduler": scheduler.state_dict(), "step": step}, f"{folder}/loop.pt")
    dist.barrier()


def load(folder, model, optimizer, scheduler):
    if os.path.exists(f"{folder}/full.pt"):
        saved = torch.load(f"{folder}/full.pt", mmap=True)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=False)):
            model.load_state_dict(saved["model"])
        full = saved["optimizer"] if dist.get_rank() == 0 else None
        optimizer.load_state_dict(FSDP.scatter_full_optim_state_dict(full, model))
    else:
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = {"model": model.state_dict()}
            dcp.load(state, checkpoint_id=f"{folder}/sharded")
            model.load_state_dict(state["model"])
            optim = dcp.load_sharded_optimizer_state_dict(
                state["model"], "optimizer", dcp.FileSystemReader(f"{folder}/sharded")
            )
            flat = FSDP.optim_state_dict_to_load(model, optimizer, optim["optimizer"])
            optimizer.load_state_dict(flat)
    loop = torch.load(f"{folder}/loop.pt")
    scheduler.load_state_dict(loop["scheduler"])
    return loop["step"]


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    total = torch.zeros(2)
    for source, target in loader:
        total += torch.tensor([model(input_ids=source, labels=target).loss.item(), 1.0])
    dist.all_reduce(total)
    model.train()
    return (total[0] / total[1]).item()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(17)
    config = T5Config(
        vocab_size=96, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, use_cache=False,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    if args.wrap == "block":
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block})
    else:
        policy = functools.partial(size_based_auto_wrap_policy, min_num_params=20_000)
    prefetch = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}
    model = FSDP(
        model,
        auto_wrap_policy=policy,
        sharding_strategy=ShardingStrategy[args.strategy],
        mixed_precision=PRECISIONS[args.precision],
        backward_prefetch=prefetch[args.prefetch],
        forward_prefetch=args.forward_prefetch,
        use_orig_params=args.orig_params,
        limit_all_gathers=not args.no_limit_all_gathers,
        device_id=torch.device("cpu"),
    )
    if args.checkpointing:
        wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        apply_activation_checkpointing(model, wrapper, check_fn=lambda m: isinstance(m, T5Block))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.85)

    generator = torch.Generator().manual_seed(5)
    train, valid = copy_task(16 * dist.get_world_size(), generator), copy_task(16, generator)
    sampler = DistributedSampler(train, shuffle=True, seed=3)
    loader = DataLoader(train, batch_size=4, sampler=sampler)
    valid_loader = DataLoader(valid, batch_size=4, sampler=DistributedSampler(valid, shuffle=False))

    start = load(f"{args.load}/checkpoint", model, optimizer, scheduler) if args.load else 0
    figures = {"loss": [], "grad_norm": [], "lr": [], "valid": [], "units": len(FSDP.fsdp_modules(model))}
    figures["flat_numel"] = [p.numel() for p in model.parameters()]
    step = 0
    while step < args.steps:
        sampler.set_epoch(step // len(loader))
        for source, target in loader:
            if step >= start and step < args.steps:
                optimizer.zero_grad()
                loss = model(input_ids=source, labels=target).loss
                loss.backward()
                norm = model.clip_grad_norm_(1.0)
                figures["lr"].append(scheduler.get_last_lr()[0])
                optimizer.step()
                scheduler.step()
                mean = loss.detach().float().clone()
                dist.all_reduce(mean)
                figures["loss"].append(mean.item() / dist.get_world_size())
                figures["grad_norm"].append(norm.item())
            step += 1
        figures["valid"].append(evaluate(model, valid_loader))

    if args.save:
        save(args.save, f"{args.out}/checkpoint", model, optimizer, scheduler, args.steps)
    weights = full_model_state(model)
    optim_config = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)
    full_config = FullStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, full_config, optim_config):
        optim = FSDP.optim_state_dict(model, optimizer)
    if rank == 0:
        os.makedirs(args.out, exist_ok=True)
        save_file({k: v.clone().contiguous() for k, v in weights.items()}, f"{args.out}/params.safetensors")
        flat = {f"{k}/{name}": v.clone() for name, s in optim["state"].items() for k, v in s.items()}
        save_file(flat, f"{args.out}/optimizer.safetensors")
        with open(f"{args.out}/figures.json", "w") as f:
            json.dump(figures, f, indent=1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
