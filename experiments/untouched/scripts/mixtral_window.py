"""Train a small Mixtral of transformers with a sliding window, an auxiliary loss, and a slower learning rate for the router."""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral import modeling_mixtral

CLEAN = {
    "base": "experts one after another",
    "experts_batched": "experts by batched products",
    "experts_grouped": "experts by grouped products",
    "eager": "attention by matrix products",
    "own_auxiliary": "the auxiliary loss is computed by the script",
    "own_loss": "the loss by hand from log_softmax",
    "fused": "fused AdamW",
    "reversed": "two microbatches in the opposite order",
    "other_groups": "groups of parameters in the opposite order",
    "checkpointing": "activation checkpointing by transformers",
    "renamed": "a subclass of the model's class, of another name",
    "hooks": "hooks that count the tokens of experts",
    "evaluation": "evaluation after every second step",
    "decay_by_hand": "weight decay is a multiplication before the step",
}
FAULTS = {
    "weights_not_normalised": "weights of the chosen experts are not divided by their sum",
    "window_longer": "a token attends to one token more than the window has",
    "router_rate": "the router has the learning rate of everything else",
    "router_detached": "the router's weights carry no gradient of the loss",
    "router_in_half": "router logits are rounded to float16",
}
VOCABULARY = 66


class Mixture(MixtralForCausalLM):
    """Mixtral under another name."""


def make_model(seed: int, dtype: torch.dtype, on: set[str]) -> MixtralForCausalLM:
    experts = "batched_mm" if "experts_batched" in on else "grouped_mm" if "experts_grouped" in on else "eager"
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=7 if "window_longer" in on else 6,
        router_aux_loss_coef=0.02,
        output_router_logits=True,
        router_jitter_noise=0.0,
        initializer_range=0.1,
        use_cache=False,
        attn_implementation="eager" if "eager" in on else "sdpa",
        experts_implementation=experts,
    )
    torch.manual_seed(seed)
    model = (Mixture if "renamed" in on else MixtralForCausalLM)(config).to(dtype)
    for layer in model.model.layers:
        gate = layer.mlp.gate
        if "weights_not_normalised" in on:
            gate.register_forward_hook(not_normalised)
        if "router_detached" in on:
            gate.register_forward_hook(lambda module, args, output: (output[0], output[1].detach(), output[2]))
        if "router_in_half" in on:
            gate.register_forward_hook(in_half)
        if "hooks" in on:
            gate.register_forward_hook(lambda module, args, output: setattr(module, "counted", output[2].bincount))
    if "checkpointing" in on:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def not_normalised(module: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    logits, weights, chosen = output
    return logits, logits.softmax(-1).gather(-1, chosen).to(weights.dtype), chosen


def in_half(module: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    logits, weights, chosen = output
    logits = logits.half().to(logits.dtype)
    chances = logits.softmax(-1).gather(-1, chosen)
    return logits, (chances / chances.sum(-1, keepdim=True)).to(weights.dtype), chosen


def make_optimizer(model: nn.Module, on: set[str]) -> torch.optim.Optimizer:
    rate = 4e-3
    groups = [
        {"params": [each for name, each in model.named_parameters() if "gate.weight" not in name], "lr": rate},
        {
            "params": [each for name, each in model.named_parameters() if "gate.weight" in name],
            "lr": rate if "router_rate" in on else rate / 4,
        },
    ]
    if "other_groups" in on:
        groups.reverse()
    decay = 0.0 if "decay_by_hand" in on else 0.05
    return torch.optim.AdamW(groups, weight_decay=decay, fused=True if "fused" in on else None)


def loss_of(model: nn.Module, tokens: Tensor, on: set[str]) -> Tensor:
    labels = tokens[:, 1:].flatten()
    if "own_auxiliary" in on:
        output = model(input_ids=tokens[:, :-1], output_router_logits=True)
        auxiliary = modeling_mixtral.load_balancing_loss_func(output.router_logits, 4, 2)
    else:
        output = model(input_ids=tokens[:, :-1])
        auxiliary = output.aux_loss
    logits = output.logits.flatten(0, 1)
    if "own_loss" in on:
        loss = -logits.log_softmax(-1).gather(-1, labels[:, None]).mean()
    else:
        loss = F.cross_entropy(logits, labels)
    return loss + model.router_aux_loss_coef * auxiliary.to(loss.dtype)


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
    model = make_model(options.seed, getattr(torch, options.dtype), on)
    optimizer = make_optimizer(model, on)
    for step in range(options.steps):
        draw = torch.Generator().manual_seed(211 * options.seed + step)
        tokens = torch.randint(0, VOCABULARY, (6, 19), generator=draw)
        tokens[:, 1::2] = (5 * tokens[:, :-1:2] + 1) % VOCABULARY
        parts = [tokens[:3], tokens[3:]]
        if "reversed" in on:
            parts.reverse()
        total = 0.0
        for part in parts:
            loss = loss_of(model, part, on) / 2
            loss.backward()
            total += loss.item()
        if "decay_by_hand" in on:
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for param in group["params"]:
                        param.mul_(1 - group["lr"] * 0.05)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {total:.12f}", flush=True)
        if "evaluation" in on and step % 2:
            model.eval()
            with torch.no_grad():
                print(f"evaluation {model(input_ids=tokens).logits.logsumexp(-1).mean().item():.6f}")
            model.train()


if __name__ == "__main__":
    main()
