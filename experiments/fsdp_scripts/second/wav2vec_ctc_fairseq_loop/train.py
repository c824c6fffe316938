"""Speech recognition with wav2vec 2.0 and CTC, in the manner of fairseq: flat shards, fp16, update_freq."""

import argparse
import functools
import json
import os
import warnings
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, OptimStateKeyType, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC
from transformers.models.wav2vec2.modeling_wav2vec2 import Wav2Vec2EncoderLayer, Wav2Vec2FeatureEncoder

warnings.filterwarnings("ignore", category=FutureWarning)
HALF = {
    "fp32": None,
    "fp16": MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16, buffer_dtype=torch.float16),
    "fp16-fp32-reduce": MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32),
    "bf16": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
}


class CompressState(default_hooks.DefaultState):
    """The compressing hooks of torch record a CUDA stream. These do the same work on the CPU."""

    def __init__(self, process_group, dtype):
        super().__init__(process_group)
        self.dtype, self.calls = dtype, 0


def compressed_reduce_scatter(state, grad, output):
    state.calls += 1
    grad.div_(state.gradient_predivide_factor)
    small = torch.empty_like(output, dtype=state.dtype)
    dist.reduce_scatter_tensor(small, grad.to(state.dtype), group=state.process_group)
    output.copy_(small).div_(state.gradient_postdivide_factor)


def compressed_all_reduce(state, grad):
    state.calls += 1
    small = grad.to(state.dtype).div_(state.world_size)
    dist.all_reduce(small, group=state.process_group)
    grad.copy_(small)


def build_model():
    config = Wav2Vec2Config(
        vocab_size=24, hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96,
        conv_dim=(32, 32, 48), conv_kernel=(10, 3, 3), conv_stride=(5, 2, 2), num_feat_extract_layers=3,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, layerdrop=0.0, mask_time_prob=0.2,
        mask_time_length=3, ctc_zero_infinity=True, ctc_loss_reduction="sum", pad_token_id=0,
    )  # fmt: skip
    return Wav2Vec2ForCTC(config)


def batch(generator, n=3):
    """Every letter sounds as a short tone of its own. The shorter utterances are padded."""
    lengths = torch.randint(5, 11, (n,), generator=generator)
    labels = torch.randint(1, 24, (n, 10), generator=generator)
    time = torch.arange(100) / 100
    wave = torch.sin(6.2832 * labels[:, :, None] * time).reshape(n, 1000)
    wave += 0.05 * torch.randn(n, 1000, generator=generator)
    sounding = torch.arange(1000) < lengths[:, None] * 100
    labels = labels.masked_fill(torch.arange(10) >= lengths[:, None], -100)
    return {"input_values": wave * sounding, "attention_mask": sounding.long(), "labels": labels}


def make_optimizer(params, args):
    if args.optimizer == "adam":
        return torch.optim.Adam(params, lr=3e-3, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01)
    return torch.optim.SGD(params, lr=2e-3, momentum=0.9, nesterov=True, foreach=True)


def save(args, model, optimizer, rank):
    folder = f"{args.out}/checkpoint"
    if args.checkpoint == "sharded":
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = {"model": model.state_dict(), "optim": FSDP.sharded_optim_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=folder)
        return
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        weights = model.state_dict()
    state = FSDP.full_optim_state_dict(model, optimizer)
    if rank == 0:
        if args.checkpoint == "ids":
            # Readable by a program that trains without FSDP.
            plain = build_model()
            plain.load_state_dict(weights)
            if args.freeze:
                plain.freeze_feature_encoder()
            state = FSDP.rekey_optim_state_dict(
                state, OptimStateKeyType.PARAM_ID, plain, optim=make_optimizer(plain.parameters(), args)
            )
        os.makedirs(folder, exist_ok=True)
        torch.save({"model": weights, "optim": state}, f"{folder}/full.pt")
    dist.barrier()


def load_optimizer(args, model, optimizer, plain_state):
    if args.checkpoint == "sharded":
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            weights = model.state_dict()
            dcp.load({"model": weights}, checkpoint_id=f"{args.load}/checkpoint")
            model.load_state_dict(weights)
            read = load_sharded_optimizer_state_dict(
                weights, "optim", dcp.FileSystemReader(f"{args.load}/checkpoint")
            )["optim"]  # fmt: skip
            state = FSDP.flatten_sharded_optim_state_dict(read, model, optimizer)
    elif args.checkpoint == "ids":
        state = FSDP.shard_full_optim_state_dict(plain_state, model, optim=optimizer)
    else:
        state = FSDP.scatter_full_optim_state_dict(
            plain_state if dist.get_rank() == 0 else None, model, optim=optimizer
        )
    optimizer.load_state_dict(state)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("out")
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--strategy", default="FULL_SHARD")
    p.add_argument("--precision", choices=list(HALF), default="fp32")
    p.add_argument("--init-scale", type=float, default=1024.0)
    p.add_argument("--update-freq", type=int, default=1)
    p.add_argument("--freeze", action="store_true", help="keep the feature encoder as it is")
    p.add_argument("--hook", choices=["plain", "fp16", "bf16"])
    p.add_argument("--clip-norm", type=float, default=10.0)
    p.add_argument("--norm-type", type=float, default=2.0)
    p.add_argument("--optimizer", choices=["adam", "nag"], default="adam")
    p.add_argument("--checkpoint", choices=["scatter", "ids", "sharded"], default="scatter")
    p.add_argument("--save", action="store_true")
    p.add_argument("--load")
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = build_model()
    if args.freeze:
        model.freeze_feature_encoder()
    plain_state = None
    if args.load and args.checkpoint != "sharded":
        full = torch.load(f"{args.load}/checkpoint/full.pt", weights_only=True)
        model.load_state_dict(full["model"])
        plain_state = full["optim"]
        if args.checkpoint == "ids":
            plain_state = FSDP.rekey_optim_state_dict(
                plain_state, OptimStateKeyType.PARAM_NAME, model, optim=make_optimizer(model.parameters(), args)
            )
    layers = {Wav2Vec2EncoderLayer, Wav2Vec2FeatureEncoder}
    model = FSDP(
        model,
        sharding_strategy=ShardingStrategy[args.strategy],
        mixed_precision=HALF[args.precision],
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=layers),
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
        device_id=torch.device("cpu"),
    )
    if args.hook == "plain":
        hook = default_hooks.allreduce_hook if args.strategy == "NO_SHARD" else default_hooks.reduce_scatter_hook
        model.register_comm_hook(default_hooks.DefaultState(dist.group.WORLD), hook)
    elif args.hook:
        hook = compressed_all_reduce if args.strategy == "NO_SHARD" else compressed_reduce_scatter
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[args.hook]
        model.register_comm_hook(CompressState(dist.group.WORLD, dtype), hook)
    optimizer = make_optimizer(model.parameters(), args)
    scaler = ShardedGradScaler(
        device="cpu", init_scale=args.init_scale, growth_interval=2, enabled=args.precision.startswith("fp16")
    )
    if args.load:
        load_optimizer(args, model, optimizer, plain_state)

    start = 3 if args.load else 0
    generator = torch.Generator().manual_seed(100 * start + rank)
    held_out = batch(torch.Generator().manual_seed(9), n=4)
    torch.manual_seed(10 + rank)  # dropout
    np.random.seed(20 + rank)  # masks of time steps
    figures = {"loss": [], "grad_norm": [], "scale": [], "valid": [], "sample_size": []}
    for _ in range(start, args.steps):
        model.train()
        optimizer.zero_grad()
        total = torch.zeros(2)
        for i in range(args.update_freq):
            data = batch(generator)
            with model.no_sync() if i < args.update_freq - 1 else nullcontext():
                loss = model(**data).loss
                scaler.scale(loss).backward()
            total += torch.stack([loss.detach().float(), (data["labels"] > 0).sum().float()])
        dist.all_reduce(total)
        scaler.unscale_(optimizer)
        for q in model.parameters():
            if q.grad is not None:
                q.grad.mul_(world / total[1])
        norm = model.clip_grad_norm_(args.clip_norm, args.norm_type)
        scaler.step(optimizer)
        scaler.update()
        figures["loss"].append((total[0] / total[1]).item())
        figures["sample_size"].append(total[1].item())
        figures["grad_norm"].append(norm.item() if norm.isfinite() else "not finite")
        figures["scale"].append(scaler.get_scale())
        model.eval()
        with torch.no_grad():
            result = model(**held_out)
        figures["valid"].append(result.loss.item())
    figures["decoded"] = result.logits.float().argmax(-1)[:2].tolist()
    figures["flat"] = [[q.numel(), str(q.dtype), q.requires_grad] for q in model.parameters()]
    figures["logits"] = str(result.logits.dtype)

    if args.save:
        save(args, model, optimizer, rank)
    FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
    weights = model.state_dict()
    optim = FSDP.optim_state_dict(model, optimizer)
    if rank == 0:
        os.makedirs(args.out, exist_ok=True)
        save_file({k: v.clone().contiguous() for k, v in weights.items()}, f"{args.out}/params.safetensors")
        flat = {f"{k}/{name}": v.clone() for name, s in optim["state"].items() for k, v in s.items() if v is not None}
        save_file(flat, f"{args.out}/optimizer.safetensors")
        with open(f"{args.out}/figures.json", "w") as f:
            json.dump(figures, f, indent=1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
