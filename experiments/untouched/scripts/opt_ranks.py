"""Train a small OPT of transformers on several ranks, with padding and two microbatches a step.

A step's loss is the sum over all labels of all ranks by their number. Each rank has its rows of one global batch.
"""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import OPTConfig, OPTForCausalLM

CLEAN = {
    "base": "gradients of DDP",
    "hand": "gradients are reduced by the script",
    "fsdp1": "sharded by torch's FullyShardedDataParallel",
    "fsdp2": "sharded by torch's fully_shard",
    "own_fsdp1": "sharded by torch_backend's FullyShardedDataParallel",
    "ours": "sharded by torch_backend's fully_shard",
    "bucket_view": "gradients are views of DDP's buckets",
    "small_buckets": "DDP's buckets have 4 KiB",
    "sync_each": "gradients are reduced after each microbatch",
    "reversed": "microbatches in the opposite order",
    "eager": "attention by matrix products",
    "fused": "fused AdamW",
    "own_loss": "the loss by hand from logsumexp",
    "checkpointing": "activation checkpointing by transformers",
}
FAULTS = {
    "local_labels": "each rank divides by its own number of labels",
    "never_reduced": "gradients of the last microbatch stay on their rank",
    "other_start": "rank 1 begins with other values (with hand)",
    "rank_scale": "on rank 1 layer 1 scales attention scores by 1 / head_dim instead of its root",
    "bf16_reduce": "gradients are reduced in bfloat16 (with ours)",
}
VOCABULARY, ROWS, LENGTH = 64, 8, 16


def make_model(seed: int, dtype: torch.dtype, on: set[str], rank: int) -> OPTForCausalLM:
    config = OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH + 4,
        dropout=0.0,
        attention_dropout=0.0,
        layerdrop=0.0,
        init_std=0.1,
        pad_token_id=0,
        use_cache=False,
        attn_implementation="eager" if "eager" in on else "sdpa",
    )
    torch.manual_seed(seed + (1 if "other_start" in on and rank == 1 else 0))
    model = OPTForCausalLM(config).to(dtype)
    if "rank_scale" in on and rank == 1:
        model.model.decoder.layers[1].self_attn.scaling = 1 / 8
    if "checkpointing" in on:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def wrap(model: OPTForCausalLM, on: set[str]) -> nn.Module:
    layers = list(model.model.decoder.layers)
    if on & {"fsdp1", "own_fsdp1"}:
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        if "fsdp1" in on:
            from torch.distributed.fsdp import FullyShardedDataParallel
        else:
            from torch_backend import FullyShardedDataParallel

        policy = ModuleWrapPolicy({type(layers[0])})
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )
    if on & {"fsdp2", "ours"}:
        if "fsdp2" in on:
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        else:
            from torch_backend import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if "bf16_reduce" in on else None)
        for layer in layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        return model
    if "hand" in on:
        return model
    buckets = {"bucket_cap_mb": 4 / 1024} if "small_buckets" in on else {}
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view="bucket_view" in on, **buckets)


def waits(model: nn.Module, reduces: bool, on: set[str]):
    """A context in which gradients are reduced, or are not."""
    if on & {"fsdp2", "ours"}:
        model.set_requires_gradient_sync(reduces)  # type: ignore[operator]
        return nullcontext()
    return nullcontext() if reduces or "hand" in on else model.no_sync()  # type: ignore[operator]


def batch_of(step: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens (ROWS, LENGTH) that are padded with 0 on the left, and which of them are tokens."""
    draw = torch.Generator().manual_seed(3001 * seed + step)
    tokens = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=draw)
    tokens[:, 1::2] = tokens[:, ::2] % 32 + 1
    padding = torch.randint(0, LENGTH // 2, (ROWS, 1), generator=draw)
    mask = torch.arange(LENGTH) >= padding
    return tokens * mask, mask


def loss_of(logits: Tensor, tokens: Tensor, mask: Tensor, on: set[str]) -> Tensor:
    """The sum over labels that are no padding and have a token before them."""
    counted = (mask[:, 1:] & mask[:, :-1]).flatten()
    logits, labels = logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    if "own_loss" in on:
        return (logits.logsumexp(-1) - logits.gather(-1, labels[:, None])[:, 0])[counted].sum()
    return F.cross_entropy(logits, labels.masked_fill(~counted, -100), reduction="sum")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", default="base", help="names joined by +")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    on = set(options.variant.split("+"))
    assert on <= CLEAN.keys() | FAULTS.keys(), on
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = wrap(make_model(options.seed, getattr(torch, options.dtype), on, rank), on)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True if "fused" in on else None)
    for step in range(options.steps):
        tokens, mask = (each.chunk(world_size)[rank] for each in batch_of(step, options.seed))
        num_labels = (mask[:, 1:] & mask[:, :-1]).sum()
        if "local_labels" in on:
            num_labels = num_labels * world_size
        else:
            dist.all_reduce(num_labels)
        parts = list(zip(tokens.chunk(2), mask.chunk(2), strict=True))
        if "reversed" in on:
            parts.reverse()
        total = 0.0
        for i, (row, seen) in enumerate(parts):
            reduces = (i == 1 or "sync_each" in on) and "never_reduced" not in on
            with waits(model, reduces, on):
                logits = model(input_ids=row, attention_mask=seen.long()).logits
                loss = loss_of(logits, row, seen, on) * world_size / num_labels  # gradients of ranks are averaged
                loss.backward()
            total += loss.item()
        if "hand" in on:
            for param in model.parameters():
                dist.all_reduce(param.grad)
                param.grad /= world_size
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {total:.12f}", flush=True)
    del model  # DDP's destructor must not be the last owner of gloo's threads: it joins them while it holds the GIL
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
