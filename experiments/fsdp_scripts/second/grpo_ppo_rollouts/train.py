"""GRPO and PPO on a small Mistral: sharded actor, critic and reference, rollouts, weight sync to an engine."""

import argparse
import contextlib
import json
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import MistralConfig, MistralForCausalLM, MistralForTokenClassification

PROMPT, ANSWER, EOS = 6, 10, 1
CONFIG = {
    "vocab_size": 95, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": EOS, "pad_token_id": EOS,
    "tie_word_embeddings": False, "initializer_range": 0.1,
}  # fmt: skip


def shard(model, mesh, policy, offload=False):
    kwargs = {"mesh": mesh, "mp_policy": policy}
    kwargs["offload_policy"] = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()
    for layer in model.model.layers:
        fully_shard(layer, **kwargs)
    fully_shard(model.model.embed_tokens, **kwargs)
    fully_shard(model, **kwargs)
    return model


def units(model):
    return [m for m in model.modules() if isinstance(m, FSDPModule)]


@contextlib.contextmanager
def whole_weights(model):
    """All weights unsharded for as long as the rollout takes."""
    model.set_reshard_after_forward(False)
    handles = [unit.unshard(async_op=True) for unit in units(model)]
    for handle in handles:
        handle.wait()
    yield model
    for unit in units(model):
        unit.reshard()
    model.set_reshard_after_forward(True)


def sync_weights(model, engine):
    """Send full tensors to the engine one at a time, as an inference server would take them."""
    own = engine.state_dict()
    for name, value in model.state_dict().items():
        own[name].copy_(value.full_tensor())


def reward(tokens, mask):
    """Rising tokens that share the parity of the prompt's last token are good."""
    answer = tokens[:, PROMPT:]
    rising = (answer > tokens[:, PROMPT - 1 : -1]).float()
    parity = ((answer + tokens[:, PROMPT - 1 : PROMPT]) % 2 == 0).float()
    return ((rising + parity) * mask).sum(1) / mask.sum(1)


def token_logprobs(model, tokens):
    logits = model(input_ids=tokens, use_cache=False).logits[:, PROMPT - 1 : -1].float()
    logp = logits.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(-1, tokens[:, PROMPT:, None]).squeeze(-1), entropy


def token_values(critic, tokens):
    return critic(input_ids=tokens, use_cache=False).logits[:, PROMPT - 1 : -1, 0].float()


def gae(rewards, values, mask, gamma=0.99, lam=0.95):
    advantages, running = torch.zeros_like(rewards), torch.zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        following = values[:, t + 1] * mask[:, t + 1] if t + 1 < rewards.shape[1] else 0.0
        running = rewards[:, t] + gamma * following - values[:, t] + gamma * lam * running
        advantages[:, t] = running
    return advantages, advantages + values


def main():
    p = argparse.ArgumentParser()
    p.add_argument("out", type=Path)
    p.add_argument("--steps", type=int, default=5)
    p.add_argument("--algorithm", choices=["grpo", "ppo"], default="grpo")
    p.add_argument("--rollout", choices=["engine", "unshard", "sharded"], default="engine")
    p.add_argument("--bf16", action="store_true")
    p.add_argument("--hsdp", action="store_true")
    p.add_argument("--no-sync", action="store_true", help="reduce the gradients at the last micro-batch only")
    p.add_argument("--offload-reference", action="store_true")
    p.add_argument("--park", action="store_true", help="move models and optimizer states away between the phases")
    p.add_argument("--group", type=int, default=4)
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--save", action="store_true")
    p.add_argument("--load", type=Path)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if args.hsdp:
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.bf16 else MixedPrecisionPolicy()

    config = MistralConfig(**CONFIG)
    torch.manual_seed(3)
    actor = MistralForCausalLM(config)
    reference = MistralForCausalLM(config).eval().requires_grad_(False)
    reference.load_state_dict(actor.state_dict())
    engine = MistralForCausalLM(config).eval().requires_grad_(False)
    models = {"actor": shard(actor, mesh, policy)}
    shard(reference, mesh, policy, offload=args.offload_reference)
    if args.algorithm == "ppo":
        critic = MistralForTokenClassification(MistralConfig(**CONFIG, num_labels=1, classifier_dropout=0.0))
        models["critic"] = shard(critic, mesh, policy)
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), lr=3e-3 if name == "actor" else 6e-3, betas=(0.9, 0.95))
        for name, model in models.items()
    }
    schedulers = {n: torch.optim.lr_scheduler.LinearLR(o, 0.25, total_iters=4) for n, o in optimizers.items()}
    sampling, start = torch.Generator(), 0
    if args.load:
        # One file per rank with the local shards.
        state = torch.load(args.load / "checkpoint" / f"world_{world}_rank_{rank}.pt", weights_only=False)
        for name in models:
            models[name].load_state_dict(state["models"][name])
            optimizers[name].load_state_dict(state["optimizers"][name])
            schedulers[name].load_state_dict(state["schedulers"][name])
        start = state["step"]

    figures = {"rewards": [], "losses": [], "value_losses": [], "kl": [], "entropy": [], "lr": [], "first_answers": []}
    figures["grad_norms"] = {name: [] for name in models}

    def park(names):
        if not args.park:
            return
        for name in names:
            models[name].to("cpu")
            for entry in optimizers[name].state.values():
                for key, value in entry.items():
                    entry[key] = value.to("cpu")

    for step in range(start, args.steps):
        # Rollout
        sampling.manual_seed(step * world + rank)
        prompts = torch.randint(2, 95, (3, PROMPT), generator=sampling).repeat_interleave(args.group, 0)
        torch.manual_seed(1000 + step * world + rank)
        park(models)
        generate = {"do_sample": True, "top_k": 0, "min_new_tokens": ANSWER, "max_new_tokens": ANSWER}
        generate["attention_mask"] = torch.ones_like(prompts)
        with torch.no_grad():
            actor.eval()
            if args.rollout == "engine":
                sync_weights(actor, engine)
                tokens = engine.generate(prompts, **generate)
            elif args.rollout == "unshard":
                with whole_weights(actor):
                    tokens = actor.generate(prompts, **generate)
            else:
                tokens = actor.generate(prompts, **generate)
            actor.train()
            answer = tokens[:, PROMPT:]
            mask = ((answer == EOS).cumsum(1) - (answer == EOS).long() == 0).float()
            scores = reward(tokens, mask)
            old, _ = token_logprobs(actor, tokens)
            fixed, _ = token_logprobs(reference, tokens)
            if args.algorithm == "grpo":
                grouped = scores.view(-1, args.group)
                spread = grouped.std(1, keepdim=True) + 1e-4
                advantages = ((grouped - grouped.mean(1, keepdim=True)) / spread).view(-1, 1).expand_as(old)
            else:
                values = token_values(critic, tokens)
                rewards = -0.05 * (old - fixed) * mask
                rewards[torch.arange(len(rewards)), mask.sum(1).long() - 1] += scores
                advantages, returns = gae(rewards, values, mask)
                moments = torch.stack([(advantages * mask).sum(), (advantages.square() * mask).sum(), mask.sum()])
                dist.all_reduce(moments)
                mean = moments[0] / moments[2]
                advantages = (advantages - mean) / (moments[1] / moments[2] - mean.square() + 1e-6).sqrt()

        # Update: two epochs, two micro-batches each
        totals = torch.zeros(4)
        for _ in range(2):
            for micro, rows in enumerate(torch.arange(len(tokens)).chunk(2)):
                m = mask[rows]
                for model in models.values():
                    model.set_requires_gradient_sync(not args.no_sync or micro == 1)
                logp, entropy = token_logprobs(actor, tokens[rows])
                ratio = (logp - old[rows]).exp()
                gain = torch.min(ratio * advantages[rows], ratio.clamp(0.8, 1.2) * advantages[rows])
                difference = fixed[rows] - logp
                kl = difference.exp() - difference - 1
                loss = ((-gain + 0.02 * kl - 0.001 * entropy) * m).sum() / m.sum()
                (loss / 2).backward()
                value_loss = torch.zeros(())
                if args.algorithm == "ppo":
                    new = token_values(critic, tokens[rows])
                    clipped = values[rows] + (new - values[rows]).clamp(-0.5, 0.5)
                    errors = torch.max((new - returns[rows]).square(), (clipped - returns[rows]).square())
                    value_loss = (errors * m).sum() / m.sum()
                    (value_loss / 4).backward()
                parts = [loss, value_loss, (kl * m).sum() / m.sum(), (entropy * m).sum() / m.sum()]
                totals += torch.stack([part.detach() for part in parts]) / 4
            for name, model in models.items():
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip).full_tensor()
                figures["grad_norms"][name].append(norm.item())
                optimizers[name].step()
                optimizers[name].zero_grad()
        for scheduler in schedulers.values():
            scheduler.step()
        totals = torch.cat([totals, scores.mean()[None]])
        dist.all_reduce(totals)
        for key, value in zip(
            ("losses", "value_losses", "kl", "entropy", "rewards"), (totals / world).tolist(), strict=True
        ):
            figures[key].append(value)
        figures["lr"].append(schedulers["actor"].get_last_lr()[0])
        figures["first_answers"].append(answer[0].tolist())

    args.out.mkdir(parents=True, exist_ok=True)
    if args.save:
        (args.out / "checkpoint").mkdir(exist_ok=True)
        state = {"models": {n: m.state_dict() for n, m in models.items()}, "step": args.steps}
        state["optimizers"] = {n: o.state_dict() for n, o in optimizers.items()}
        state["schedulers"] = {n: s.state_dict() for n, s in schedulers.items()}
        torch.save(state, args.out / "checkpoint" / f"world_{world}_rank_{rank}.pt")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = {}, {}
    for name, model in models.items():
        weights |= {f"{name}.{k}": v for k, v in get_model_state_dict(model, options=options).items()}
        state = get_optimizer_state_dict(model, optimizers[name], options=options).get("state", {})
        moments |= {f"{s}/{name}.{k}": t for k, entry in state.items() for s, t in entry.items()}
    if rank == 0:
        figures["units"] = {n: [type(u).__name__ for u in units(m)] for n, m in models.items()}
        (args.out / "figures.json").write_text(json.dumps(figures, indent=1))
        save_file({k: v.contiguous() for k, v in weights.items()}, args.out / "params.safetensors")
        save_file({k: v.contiguous() for k, v in moments.items()}, args.out / "optimizer.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
