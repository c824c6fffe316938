"""Train a small BLOOM of transformers on several ranks: padded rows, Adam with AMSGrad and L2, gradients of DDP, FSDP or by hand.

A step's loss is the sum over all labels of all ranks by their number. Each rank has its rows of one global batch.
"""

import argparse
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BloomConfig, BloomForCausalLM
from transformers.models.bloom.modeling_bloom import BloomAttention

CLEAN = {
    "base": "gradients of DDP",
    "flat": "the script reduces one flat tensor, in which each gradient is padded",
    "one_by_one": "the script reduces each gradient",
    "fsdp1": "sharded by torch's FullyShardedDataParallel",
    "fsdp2": "sharded by torch's fully_shard",
    "own_fsdp1": "sharded by torch_backend's FullyShardedDataParallel",
    "ours": "sharded by torch_backend's fully_shard",
    "bucket_view": "gradients are views of DDP's buckets",
    "small_buckets": "DDP's buckets have 4 KiB",
    "static_graph": "DDP's graph is static",
    "sum_hook": "a hook of DDP reduces by a sum and divides after it",
    "fused": "fused Adam",
    "own_loss": "the loss by hand from logsumexp",
    "foreach": "foreach Adam",
    "checkpointing": "activation checkpointing by transformers",
    "renamed": "a subclass of the model's class, of another name",
}
FAULTS = {
    "rank_lost": "gradients of rank 1 are set to zero before they are reduced (with flat)",
    "divided_twice": "gradients that DDP has averaged are divided by the number of ranks",
    "bf16_hook": "DDP reduces gradients in bfloat16",
    "same_rows": "each rank has the rows of rank 0",
    "padding_forgotten": "gradients are read from the flat tensor without counting padding (with flat)",
    "qkv_layout": "queries, keys and values are read as three blocks instead of head by head",
}
VOCABULARY, ROWS, LENGTH, UNIT = 64, 8, 12, 48


class Writer(BloomForCausalLM):
    """BLOOM under another name."""


def three_blocks(self: BloomAttention, fused: Tensor) -> tuple[Tensor, ...]:
    return tuple(fused.unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4))


def sum_hook(group, bucket):
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0] / dist.get_world_size())


def bf16_hook(group, bucket):
    future = dist.all_reduce(bucket.buffer().bfloat16() / dist.get_world_size(), async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def make_model(seed: int, dtype: torch.dtype, on: set[str]) -> BloomForCausalLM:
    config = BloomConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        n_layer=2,
        n_head=4,
        initializer_range=0.12,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    if "qkv_layout" in on:
        BloomAttention._reshape = three_blocks
    torch.manual_seed(seed)
    model = (Writer if "renamed" in on else BloomForCausalLM)(config).to(dtype)
    if "checkpointing" in on:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def wrap(model: BloomForCausalLM, on: set[str]) -> nn.Module:
    blocks = list(model.transformer.h)
    if on & {"fsdp1", "own_fsdp1"}:
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        if "fsdp1" in on:
            from torch.distributed.fsdp import FullyShardedDataParallel
        else:
            from torch_backend import FullyShardedDataParallel

        policy = ModuleWrapPolicy({type(blocks[0])})
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )
    if on & {"fsdp2", "ours"}:
        if "fsdp2" in on:
            from torch.distributed.fsdp import fully_shard
        else:
            from torch_backend import fully_shard

        for block in blocks:
            fully_shard(block)
        fully_shard(model)
        return model
    if on & {"flat", "one_by_one"}:
        return model
    buckets = {"bucket_cap_mb": 4 / 1024} if "small_buckets" in on else {}
    wrapped = nn.parallel.DistributedDataParallel(
        model, gradient_as_bucket_view="bucket_view" in on, static_graph="static_graph" in on, **buckets
    )
    if "bf16_hook" in on:
        wrapped.register_comm_hook(None, bf16_hook)
    if "sum_hook" in on:
        wrapped.register_comm_hook(None, sum_hook)
    return wrapped


def reduce_flat(params: list[nn.Parameter], on: set[str]) -> None:
    """Average gradients over ranks as one tensor, in which each begins at a multiple of UNIT."""
    parts = []
    for param in params:
        flat = param.grad.flatten()
        parts.append(F.pad(flat, (0, -len(flat) % UNIT)))
    whole = torch.cat(parts)
    dist.all_reduce(whole)
    whole /= dist.get_world_size()
    start = 0
    for param, part in zip(params, parts, strict=True):
        param.grad.copy_(whole[start : start + param.numel()].view_as(param))
        start += param.numel() if "padding_forgotten" in on else len(part)


def reduce(params: list[nn.Parameter], on: set[str]) -> None:
    """Whatever the script itself does to gradients between backward and the optimizer."""
    if "rank_lost" in on and dist.get_rank() == 1:
        for param in params:
            param.grad.zero_()
    if "flat" in on:
        reduce_flat(params, on)
    if "one_by_one" in on:
        for param in params:
            param.grad /= dist.get_world_size()
            dist.all_reduce(param.grad)
    if "divided_twice" in on:
        for param in params:
            param.grad /= dist.get_world_size()


def batch_of(step: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens (ROWS, LENGTH) that are padded with 0 on the right, and which of them are tokens."""
    draw = torch.Generator().manual_seed(5009 * seed + step)
    tokens = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=draw)
    tokens[:, 2::2] = (tokens[:, 0:-2:2] * 3) % (VOCABULARY - 1) + 1
    mask = torch.arange(LENGTH) < torch.randint(LENGTH // 2, LENGTH + 1, (ROWS, 1), generator=draw)
    return tokens * mask, mask


def loss_of(logits: Tensor, tokens: Tensor, on: set[str]) -> Tensor:
    logits, labels = logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    if "own_loss" in on:
        return (logits.logsumexp(-1) - logits.gather(-1, labels[:, None])[:, 0])[labels > 0].sum()
    return F.cross_entropy(logits, labels, ignore_index=0, reduction="sum")


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
    model = wrap(make_model(options.seed, getattr(torch, options.dtype), on), on)
    params = list(model.parameters())
    kinds = {"fused": True if "fused" in on else None, "foreach": True if "foreach" in on else None}
    optimizer = torch.optim.Adam(params, lr=2e-3, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.01, amsgrad=True, **kinds)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / math.sqrt(step + 1))
    for step in range(options.steps):
        rows, masks = (each.chunk(world_size) for each in batch_of(step, options.seed))
        tokens, mask = (rows[0], masks[0]) if "same_rows" in on else (rows[rank], masks[rank])
        num_labels = mask[:, 1:].sum()
        dist.all_reduce(num_labels)
        logits = model(input_ids=tokens, attention_mask=mask.long()).logits
        loss = loss_of(logits, tokens, on) * world_size / num_labels  # gradients of ranks are averaged
        loss.backward()
        reduce(params, on)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {loss.item():.12f}", flush=True)
    del model  # DDP's destructor must not be the last owner of gloo's threads: it joins them while it holds the GIL
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
