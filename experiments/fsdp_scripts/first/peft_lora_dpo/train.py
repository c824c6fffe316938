"""Preference tuning (DPO) of a LoRA policy. The policy and its frozen reference are both sharded with FSDP."""

import argparse
import functools
import json
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from safetensors.torch import load_file, save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FullStateDictConfig, MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import (
    _or_policy,
    lambda_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch.optim.lr_scheduler import LinearLR
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block


def pairs(n, seed):
    """A prompt, a chosen answer that goes on counting, and a rejected one of noise."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(0, 50, (n, 1), generator=generator)
    prompt = start + torch.arange(6)
    chosen = start + 6 + torch.arange(8)
    rejected = torch.randint(0, 64, (n, 8), generator=generator)
    return torch.cat([prompt, chosen], 1) % 64, torch.cat([prompt, rejected], 1) % 64


def answer_logps(model, tokens):
    logits = model(input_ids=tokens).logits[:, :-1].float()
    logps = torch.log_softmax(logits, -1).gather(2, tokens[:, 1:, None]).squeeze(2)
    return logps[:, 5:].sum(1)


def wrap_policy(kind, model):
    if kind == "peft":
        # PEFT finds the transformer block by this variable.
        os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = "GPT2Block"
        return fsdp_auto_wrap_policy(model)
    block = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={GPT2Block})
    if kind == "block":
        return block

    def trainable_leaf(module):
        own = list(module.parameters(recurse=False))
        return not list(module.children()) and bool(own) and all(p.requires_grad for p in own)

    leaves = functools.partial(lambda_auto_wrap_policy, lambda_fn=trainable_leaf)
    return functools.partial(_or_policy, policies=[block, leaves])


def shard(model, args, kind):
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if args.bf16 else None
    return FSDP(
        model,
        auto_wrap_policy=wrap_policy(kind, model),
        sharding_strategy=ShardingStrategy[args.strategy],
        mixed_precision=precision,
        use_orig_params=kind == "block",
        device_id=torch.device("cpu"),
        ignored_states=[model.base_model.model.transformer.wpe] if args.ignore_positions else None,
    )


def main():
    p = argparse.ArgumentParser()
    p.add_argument("out")
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--policy", choices=["block", "leaves", "peft"], default="block")
    p.add_argument("--reference", choices=["sharded", "adapter_off"], default="sharded")
    p.add_argument("--strategy", default="FULL_SHARD")
    p.add_argument("--bf16", action="store_true")
    p.add_argument("--dora", action="store_true")
    p.add_argument("--train-head", action="store_true")
    p.add_argument("--ignore-positions", action="store_true")
    p.add_argument("--checkpointing", action="store_true")
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--save", action="store_true")
    p.add_argument("--load")
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=64, n_positions=32, n_embd=64, n_layer=3, n_head=4, use_cache=False, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=not args.train_head,
    )  # fmt: skip
    base, reference = GPT2LMHeadModel(config), None
    if args.reference == "sharded":
        reference = GPT2LMHeadModel(config)
        reference.load_state_dict(base.state_dict())
        reference = FSDP(
            reference.eval().requires_grad_(False),
            auto_wrap_policy=wrap_policy("block", reference),
            sharding_strategy=ShardingStrategy[args.strategy],
            device_id=torch.device("cpu"),
        )
    lora = LoraConfig(
        r=4, lora_alpha=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, use_dora=args.dora,
        modules_to_save=["lm_head"] if args.train_head else None, task_type="CAUSAL_LM",
    )  # fmt: skip
    policy = get_peft_model(base, lora)
    if args.load:
        adapter = load_file(f"{args.load}/checkpoint/adapter.safetensors")
        assert not policy.load_state_dict(adapter, strict=False).unexpected_keys
    trainable, total = policy.get_nb_trainable_parameters()
    policy = shard(policy, args, args.policy)
    if args.checkpointing:
        apply_activation_checkpointing(policy, check_fn=lambda m: isinstance(m, GPT2Block))

    optimizer = torch.optim.AdamW([q for q in policy.parameters() if q.requires_grad], lr=8e-3, weight_decay=0.0)
    schedule = LinearLR(optimizer, start_factor=0.4, total_iters=4)
    step = 0
    if args.load:
        saved = torch.load(f"{args.load}/checkpoint/loop.pt")
        sharded = FSDP.shard_full_optim_state_dict(saved["optimizer"], policy, optim=optimizer)
        optimizer.load_state_dict(sharded)
        schedule.load_state_dict(saved["schedule"])
        step = saved["step"]

    chosen, rejected = pairs(4 * world * 8, seed=1)
    held = [t[rank * 4 : rank * 4 + 4] for t in pairs(4 * world, seed=2)]

    def dpo(batch_chosen, batch_rejected, beta=0.3):
        tokens = torch.cat([batch_chosen, batch_rejected])
        with torch.no_grad():
            if reference is not None:
                ref = answer_logps(reference, tokens)
            else:
                with policy.module.disable_adapter():
                    ref = answer_logps(policy, tokens)
        rewards = beta * (answer_logps(policy, tokens) - ref)
        good, bad = rewards.chunk(2)
        return -F.logsigmoid(good - bad).mean(), (good > bad).float().mean(), (good - bad).mean()

    figures = {"loss": [], "accuracy": [], "margin": [], "grad_norm": [], "lr": [], "trainable": [trainable, total]}
    while step < args.steps:
        rows = slice((step * world + rank) * 4, (step * world + rank) * 4 + 4)
        loss, accuracy, margin = dpo(chosen[rows], rejected[rows])
        optimizer.zero_grad()
        loss.backward()
        figures["grad_norm"].append(policy.clip_grad_norm_(args.clip).item())
        figures["lr"].append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
        values = torch.stack([loss.detach(), accuracy, margin.detach()])
        dist.all_reduce(values)
        for name, value in zip(("loss", "accuracy", "margin"), (values / world).tolist(), strict=True):
            figures[name].append(value)
        step += 1
    policy.eval()
    with torch.no_grad():
        values = torch.stack(dpo(*held))
    dist.all_reduce(values)
    figures["held_out"] = (values / world).tolist()
    figures["units"] = len(FSDP.fsdp_modules(policy))
    figures["sharded_numel"] = sum(q.numel() for q in policy.parameters() if q.requires_grad)
    if not args.bf16:
        # The root is gathered here. The blocks gather themselves in their forward.
        prompt = torch.arange(6).unsqueeze(0)
        with FSDP.summon_full_params(policy, writeback=False, recurse=False), torch.no_grad():
            tokens = policy.module.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=6,
                do_sample=False,
                pad_token_id=0,
            )
        figures["generated"] = tokens[0].tolist()

    with FSDP.state_dict_type(policy, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
        weights = policy.state_dict()
    optim = FSDP.full_optim_state_dict(policy, optimizer, rank0_only=True)
    if rank == 0:
        os.makedirs(f"{args.out}/checkpoint", exist_ok=True)
        weights = {k: v.clone().contiguous() for k, v in weights.items()}
        save_file(weights, f"{args.out}/params.safetensors")
        flat = {f"{k}/{name}": v.clone() for name, s in optim["state"].items() for k, v in s.items()}
        save_file(flat, f"{args.out}/optimizer.safetensors")
        if args.save:
            adapter = {k: v for k, v in weights.items() if "lora_" in k or "modules_to_save" in k}
            save_file(adapter, f"{args.out}/checkpoint/adapter.safetensors")
            loop = {"optimizer": optim, "schedule": schedule.state_dict(), "step": step}
            torch.save(loop, f"{args.out}/checkpoint/loop.pt")
        with open(f"{args.out}/figures.json", "w") as f:
            json.dump(figures, f, indent=1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
