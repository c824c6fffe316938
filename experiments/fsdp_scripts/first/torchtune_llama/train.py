"""Fine-tune a small Llama 3 with torchtune's building blocks: full weights or LoRA, sharded with shard_model."""

import argparse
import json
import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torchao.optim import AdamW8bit
from torchtune import training, utils
from torchtune.models.llama3 import llama3, lora_llama3
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.modules.loss import CEWithChunkedOutputLoss
from torchtune.modules.peft import get_adapter_params, get_merged_lora_ckpt, set_trainable_params
from torchtune.training import _distributed as tune_distributed
from torchtune.training.lr_schedulers import get_cosine_schedule_with_warmup

VOCAB, SEQ, IGNORE = 500, 48, -100


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("out", type=Path)
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--lora", action="store_true")
    p.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    p.add_argument("--cpu-offload", action="store_true")
    p.add_argument("--no-reshard", action="store_true")
    p.add_argument("--ac", action="store_true", help="activation checkpointing")
    p.add_argument("--shard-embeddings", action="store_true", help="shard embedding and output layers of their own")
    p.add_argument("--accumulate", type=int, default=1)
    p.add_argument("--clip", type=float, default=None)
    p.add_argument("--optimizer", choices=["adamw", "fused", "8bit"], default="adamw")
    p.add_argument("--hsdp", action="store_true")
    p.add_argument("--save", action="store_true")
    p.add_argument("--load", type=Path)
    return p.parse_args()


def build(lora):
    shape = dict(
        vocab_size=VOCAB,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        embed_dim=64,
        max_seq_len=SEQ,
        intermediate_dim=160,
        rope_base=10000,
    )
    if lora:
        return lora_llama3(
            ["q_proj", "v_proj", "output_proj"], apply_lora_to_mlp=True, lora_rank=4, lora_alpha=8, **shape
        )
    return llama3(**shape)


def shard(model, args, mesh):
    names = ["tok_embeddings", "output"] if args.shard_embeddings else None
    training.shard_model(
        model=model,
        shard_conditions=[partial(training.get_shard_conditions, names_to_match=names)],
        cpu_offload=args.cpu_offload,
        reshard_after_forward=not args.no_reshard,
        dp_mesh=mesh,
    )


def batches(rank, micro_steps):
    rng = torch.Generator().manual_seed(900 + rank)
    table = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))
    for _ in range(micro_steps):
        tokens = torch.randint(0, VOCAB, (2, SEQ + 1), generator=rng)
        for t in range(1, SEQ + 1, 2):
            tokens[:, t] = table[tokens[:, t - 1]]
        labels = tokens[:, 1:].clone()
        labels[:, : 4 + rank] = IGNORE
        yield {"tokens": tokens[:, :-1], "labels": labels}


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = utils.get_world_size_and_rank()[::-1]
    device = torch.device("cpu")
    dtype = training.get_dtype(args.dtype, device=device)
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard")) if args.hsdp else None
    if args.cpu_offload:
        # There is no memory to pin without an accelerator.
        tune_distributed.CPUOffloadPolicy = partial(CPUOffloadPolicy, pin_memory=False)

    # Stands for the pretrained checkpoint, which every rank reads.
    torch.manual_seed(7)
    base = build(args.lora).state_dict()
    with training.set_default_dtype(dtype), torch.device("meta"):
        model = build(args.lora)
    if args.lora:
        set_trainable_params(model, get_adapter_params(model))
    if args.ac:
        training.set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    shard(model, args, mesh)
    with training.set_default_dtype(dtype), device:
        for m in model.modules():
            if hasattr(m, "rope_init"):
                m.rope_init()
    resumed = torch.load(args.load / "checkpoint" / "state.pt") if args.load else None
    training.load_from_full_model_state_dict(
        model, resumed["model"] if resumed else base, device, strict=True, cpu_offload=args.cpu_offload
    )
    training.validate_no_params_on_meta_device(model)

    trainable = [p for p in model.parameters() if p.requires_grad]
    if args.optimizer == "8bit":
        optimizer = AdamW8bit(trainable, lr=3e-3, weight_decay=0.01)
    else:
        optimizer = torch.optim.AdamW(trainable, lr=3e-3, weight_decay=0.01, fused=args.optimizer == "fused")
    start = 0
    if resumed:
        training.load_from_full_optimizer_state_dict(model, optimizer, resumed["optimizer"], device)
        start = resumed["step"]
    scheduler = get_cosine_schedule_with_warmup(optimizer, 2, 12, last_epoch=start - 1)

    loss_fn = CEWithChunkedOutputLoss(num_output_chunks=4, ignore_index=IGNORE)
    model.set_num_output_chunks(loss_fn.num_output_chunks)
    losses, norms, rates = [], [], []
    stream = list(batches(rank, args.steps * args.accumulate))[start * args.accumulate :]
    running, tokens = torch.zeros(()), torch.zeros(())
    for i, batch in enumerate(stream):
        count = (batch["labels"] != IGNORE).sum()
        tokens += count
        loss = loss_fn(model(batch["tokens"]), batch["labels"]) * count
        running += loss.detach()
        last = (i + 1) % args.accumulate == 0
        if last:
            dist.all_reduce(tokens)
            dist.all_reduce(running)
            loss = loss * (world / tokens) if args.accumulate == 1 else loss
        loss.backward()
        if not last:
            continue
        if args.accumulate > 1:
            training.scale_grads(model, world / tokens)
        if args.clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=args.clip)
            norms.append(norm.full_tensor().item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append((running / tokens).item())
        rates.append(float(scheduler.get_last_lr()[0]))
        scheduler.step()
        running, tokens = torch.zeros(()), torch.zeros(())

    state = training.gather_cpu_state_dict(model, rank == 0, device=device)
    optim_state = {}
    if args.optimizer != "8bit":
        optim_state = training.get_full_optimizer_state_dict(model, optimizer, rank == 0, device=device)
    local = sum(p.to_local().numel() for p in model.parameters())
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        if args.save:
            os.makedirs(args.out / "checkpoint")
            torch.save(
                {"model": state, "optimizer": optim_state, "step": args.steps}, args.out / "checkpoint" / "state.pt"
            )
        figures = {
            "losses": losses,
            "grad_norms": norms,
            "learning_rates": rates,
            "local_elements": local,
            "trainable": sum(p.numel() for p in trainable),
            "sharded_modules": [n for n, m in model.named_modules() if isinstance(m, FSDPModule)],
            "dtypes": sorted({str(v.dtype) for v in state.values()}),
        }
        if args.lora:
            merged = get_merged_lora_ckpt({k: v.clone() for k, v in state.items()}, rank=4, alpha=8)
            figures["merged_sums"] = {k: v.double().sum().item() for k, v in merged.items()}
        (args.out / "figures.json").write_text(json.dumps(figures, indent=1))
        save_file({k: v.contiguous() for k, v in state.items()}, args.out / "params.safetensors")
        flat = {f"{s}/{n}": t for n, d in optim_state.get("state", {}).items() for s, t in d.items()}
        if flat:
            save_file(flat, args.out / "optimizer.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
