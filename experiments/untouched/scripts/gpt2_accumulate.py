"""Train a small GPT-2 of transformers over microbatches of unequal length, on any number of ranks.

Gradients of ranks are averaged by hand, or by what `--wrap` names. A label of -100 is padding. A step's loss is the sum over the
tokens of all of a rank's microbatches over their number, which is the same on all ranks.
"""

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2 import modeling_gpt2

CLEAN = {
    "base": "microbatches in order",
    "reversed": "microbatches in the opposite order",
    "whole_batch": "all microbatches as one, padded",
    "sync_each": "gradients are reduced after each microbatch instead of after the last one",
    "eager": "attention by matrix products",
    "fused": "fused AdamW",
    "checkpointing": "activation checkpointing of each MLP",
    "clip": "clipping by torch, by a norm that is never reached",
    "renamed": "a subclass of the model's class, of another name",
}
FAULTS = {
    "mean_of_means": "each microbatch is averaged over its own tokens, and then over microbatches",
    "labels_not_shifted": "a token's label is the token itself",
    "lost_microbatch": "gradients are set to zero after the first microbatch",
    "sum_ranks": "gradients are summed over ranks instead of averaged (by hand)",
    "rank_left_out": "rank 1 contributes zeros to the sum over ranks (by hand)",
    "bf16_reduce": "gradients of each microbatch are reduced in bfloat16 (by hand)",
    "same_data": "all ranks train on the batches of rank 0",
    "positions_shifted": "positions start at 1 instead of 0",
    "detached_mlp": "the MLP of layer 1 is detached",
    "erf_gelu": "GELU by erf instead of by tanh",
    "rank_eps": "on rank 1 the first norm of layer 0 has epsilon 1e-2 instead of 1e-5",
    "unreduced_gradient": "the gradient of one parameter is not averaged over ranks (by hand)",
    "dropout_in_block": "layer 0 drops a tenth of its MLP's output",
}
MICROBATCHES, VOCABULARY = 3, 80


class MyDecoder(GPT2LMHeadModel):
    """GPT-2 under another name."""


def make_model(seed: int, dtype: torch.dtype, on: set[str], rank: int) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=40,
        n_embd=32,
        n_layer=3,
        n_head=4,
        initializer_range=0.1,
        activation_function="gelu" if "erf_gelu" in on else "gelu_new",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="eager" if "eager" in on else "sdpa",
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(seed)
    model = (MyDecoder if "renamed" in on else GPT2LMHeadModel)(config).to(dtype)
    body = model.transformer
    if "positions_shifted" in on:
        body.wpe.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    if "detached_mlp" in on:
        mlp = body.h[1].mlp
        given = mlp.forward
        mlp.forward = lambda hidden: given(hidden).detach()
    if "dropout_in_block" in on:
        body.h[0].mlp.dropout.p = 0.1
    if "rank_eps" in on and rank == 1:
        body.h[0].ln_1.eps = 1e-2
    if "checkpointing" in on:
        for block in body.h:
            mlp = block.mlp
            mlp.forward = checkpointed(mlp.forward)
    return model


def checkpointed(forward):
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


def wrap(model: nn.Module, how: str) -> nn.Module:
    """The model as data parallelism of this kind trains it."""
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if how == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        policy = ModuleWrapPolicy({modeling_gpt2.GPT2Block})
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )
    if how == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.transformer.h:  # type: ignore[union-attr]
            fully_shard(block)
        return fully_shard(model)
    if how == "ours":
        from torch_backend import fully_shard as own_fully_shard

        for block in model.transformer.h:  # type: ignore[union-attr]
            own_fully_shard(block)
        own_fully_shard(model)
        return model
    assert how == "hand", how
    return model


def waits(model: nn.Module, how: str, is_last: bool):
    """A context in which gradients are not reduced, except for the last microbatch."""
    if how in ("ddp", "fsdp1"):
        return nullcontext() if is_last else model.no_sync()  # type: ignore[operator]
    if how in ("fsdp2", "ours"):
        model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
    return nullcontext()


def reduce_by_hand(model: nn.Module, world_size: int, on: set[str], rank: int) -> None:
    for name, param in model.named_parameters():
        if param.grad is None or ("unreduced_gradient" in on and name == "transformer.h.2.mlp.c_fc.weight"):
            continue
        grad = param.grad.bfloat16() if "bf16_reduce" in on else param.grad
        if "rank_left_out" in on and rank == 1:
            grad = torch.zeros_like(grad)
        dist.all_reduce(grad)
        param.grad.copy_(grad if "sum_ranks" in on else grad / world_size)


def microbatches_of(step: int, seed: int, rank: int, on: set[str]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(tokens, labels) of each microbatch, of 6 to 30 tokens a sample; 3 x 54 labels a rank."""
    draw = torch.Generator().manual_seed(7919 * seed + 31 * step + (0 if "same_data" in on else rank))
    found = []
    for length in (30, 18, 6):
        tokens = torch.randint(0, VOCABULARY, (3, length + 1), generator=draw)
        labels = tokens.clone()
        labels[:, 0] = -100
        found.append((tokens, labels))
    if "reversed" in on:
        found.reverse()
    if "whole_batch" in on:
        most = max(tokens.shape[1] for tokens, _ in found)
        tokens = torch.cat([F.pad(each, (0, most - each.shape[1]), value=0) for each, _ in found])
        labels = torch.cat([F.pad(each, (0, most - each.shape[1]), value=-100) for _, each in found])
        return [(tokens, labels)]
    return found


def loss_of(
    model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor, num_labels: int, on: set[str]
) -> torch.Tensor:
    logits = model(input_ids=tokens).logits
    if "labels_not_shifted" in on:
        logits, labels = logits[:, 1:], labels[:, 1:]
    else:
        logits, labels = logits[:, :-1], labels[:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
    if "mean_of_means" in on:
        return total / (labels != -100).sum() / MICROBATCHES
    return total / num_labels


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", default="base", help="names joined by +")
    parser.add_argument("--wrap", default="hand", choices=["hand", "ddp", "fsdp1", "fsdp2", "ours"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    on = set(options.variant.split("+"))
    assert on <= CLEAN.keys() | FAULTS.keys(), on
    torch.set_num_threads(1)
    is_distributed = "RANK" in os.environ
    if is_distributed:
        dist.init_process_group("gloo")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if is_distributed else (0, 1)
    how = options.wrap if is_distributed else "hand"
    model = make_model(options.seed, getattr(torch, options.dtype), on, rank)
    model = wrap(model, how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01, fused="fused" in on)
    by_hand = is_distributed and how == "hand"
    for step in range(options.steps):
        batches = microbatches_of(step, options.seed, rank, on)
        num_labels = sum(int((labels != -100).sum()) for _, labels in batches)
        losses: list[float] = []
        kept: dict[nn.Parameter, torch.Tensor] = {}
        for i, (tokens, labels) in enumerate(batches):
            is_last = i == len(batches) - 1
            with waits(model, how, is_last or "sync_each" in on):
                loss = loss_of(model, tokens, labels, num_labels, on)
                loss.backward()
            losses.append(loss.item())
            if by_hand and "bf16_reduce" in on:  # reduced microbatch by microbatch, and added up afterwards
                reduce_by_hand(model, world_size, on, rank)
                for param in model.parameters():
                    if param.grad is not None:
                        kept[param] = kept[param] + param.grad if param in kept else param.grad.clone()
                        param.grad.zero_()
            if "lost_microbatch" in on and i == 0:
                optimizer.zero_grad()
        for param, grad in kept.items():
            param.grad = grad
        if by_hand and "bf16_reduce" not in on:
            reduce_by_hand(model, world_size, on, rank)
        if "clip" in on:
            (model.clip_grad_norm_ if how == "fsdp1" else clip(model))(1e3)  # type: ignore[operator]
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {sum(losses):.12f}", flush=True)
    del model  # DDP's destructor must not be the last owner of gloo's threads: it joins them while it holds the GIL
    if is_distributed:
        dist.destroy_process_group()


def clip(model: nn.Module):
    return lambda most: nn.utils.clip_grad_norm_(model.parameters(), most)


if __name__ == "__main__":
    main()
