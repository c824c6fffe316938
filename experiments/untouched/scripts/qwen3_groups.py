"""Train a small Qwen3 of transformers on microbatches of unequal length, with two groups of parameters, a schedule and clipping.

The head is tied to the embedding. A step's loss is the sum over the labels of both microbatches by their number.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3 import modeling_qwen3

CLEAN = {
    "base": "microbatches in order, gradients clipped by torch to norm 1",
    "reversed": "microbatches in the opposite order",
    "one_backward": "one backward pass of the sum of both losses",
    "eager": "attention by matrix products",
    "own_loss": "the loss by hand from logsumexp",
    "fused": "fused AdamW",
    "foreach": "foreach AdamW",
    "clip_hand": "clipping by hand",
    "checkpointing": "activation checkpointing by transformers",
    "renamed": "a subclass of the model's class, of another name",
    "subclass": "a subclass of AdamW that counts its steps",
    "zero_in_place": "gradients are set to zero instead of to None",
    "hooks": "hooks that look at the output of each layer",
    "evaluation": "evaluation after every second step",
}
FAULTS = {
    "query_norm_epsilon": "the norm of queries in layer 1 has epsilon 1e-3 instead of 1e-6",
    "interleaved_heads": "key and value heads are repeated one after another instead of each in place",
    "clip_by_group": "each group of parameters is clipped by its own norm",
    "warmup_late": "the schedule counts steps from 0 instead of 1",
    "own_head": "the head has its own parameter, which begins with the values of the embedding",
}
VOCABULARY = 70


class Reader(Qwen3ForCausalLM):
    """Qwen3 under another name."""


class CountingAdamW(torch.optim.AdamW):
    num_steps = 0

    def step(self, closure=None):  # type: ignore[override]
        self.num_steps += 1
        return super().step(closure)


def repeat_one_after_another(hidden: Tensor, times: int) -> Tensor:
    return hidden.repeat(1, times, 1, 1)


def make_model(seed: int, dtype: torch.dtype, on: set[str]) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.1,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="eager" if on & {"eager", "interleaved_heads"} else "sdpa",
    )
    if "interleaved_heads" in on:
        modeling_qwen3.repeat_kv = repeat_one_after_another
    torch.manual_seed(seed)
    model = (Reader if "renamed" in on else Qwen3ForCausalLM)(config).to(dtype)
    if "query_norm_epsilon" in on:
        model.model.layers[1].self_attn.q_norm.variance_epsilon = 1e-3
    if "own_head" in on:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    if "checkpointing" in on:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if "hooks" in on:
        for layer in model.model.layers:
            layer.register_forward_hook(lambda module, args, output: print(end="" if output is not None else "none"))
    return model.train()


def make_optimizer(model: nn.Module, on: set[str]) -> torch.optim.Optimizer:
    groups = [
        {"params": [each for each in model.parameters() if each.ndim > 1], "weight_decay": 0.1},
        {"params": [each for each in model.parameters() if each.ndim == 1], "weight_decay": 0.0},
    ]
    kind = CountingAdamW if "subclass" in on else torch.optim.AdamW
    return kind(groups, lr=3e-3, betas=(0.9, 0.95), fused=True if "fused" in on else None, foreach="foreach" in on)


def microbatches_of(step: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """(tokens, labels) of two microbatches; a label of -100 is not counted."""
    draw = torch.Generator().manual_seed(1009 * seed + step)
    found = []
    for rows, length, unlabelled in ((4, 14, 3), (3, 22, 9)):
        tokens = torch.randint(0, VOCABULARY, (rows, length), generator=draw)
        tokens[:, length // 2 :] = tokens[:, : length - length // 2]
        labels = tokens.roll(-1, 1)
        labels[:, -1] = -100
        labels[:, :unlabelled] = -100
        found.append((tokens, labels))
    return found


def loss_of(logits: Tensor, labels: Tensor, num_labels: int, on: set[str]) -> Tensor:
    if "own_loss" in on:
        counted = labels >= 0
        right = logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return (logits.logsumexp(-1) - right)[counted].sum() / num_labels
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_labels


def clip(optimizer: torch.optim.Optimizer, on: set[str]) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if "clip_by_group" in on:
        for group in optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 1.0)
    elif "clip_hand" in on:
        total = torch.sqrt(sum(param.grad.square().sum() for param in params))
        factor = min(1.0, 1.0 / (float(total) + 1e-6))
        for param in params:
            param.grad *= factor
    else:
        nn.utils.clip_grad_norm_(params, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", default="base", help="names joined by +")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    on = set(options.variant.split("+"))
    assert on <= CLEAN.keys() | FAULTS.keys(), on
    torch.set_num_threads(1)
    model = make_model(options.seed, getattr(torch, options.dtype), on)
    optimizer = make_optimizer(model, on)
    first = 0 if "warmup_late" in on else 1
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + first) / 3))
    for step in range(options.steps):
        batches = microbatches_of(step, options.seed)
        num_labels = sum(int((labels >= 0).sum()) for _, labels in batches)
        if "reversed" in on:
            batches.reverse()
        losses = []
        for tokens, labels in batches:
            losses.append(loss_of(model(input_ids=tokens).logits, labels, num_labels, on))
            if "one_backward" not in on:
                losses[-1].backward()
        if "one_backward" in on:
            sum(losses).backward()
        clip(optimizer, on)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none="zero_in_place" not in on)
        print(f"step {step} loss {sum(each.item() for each in losses):.12f}", flush=True)
        if "evaluation" in on and step % 2:
            model.eval()
            with torch.no_grad():
                print(f"evaluation {model(input_ids=batches[0][0]).logits.logsumexp(-1).mean().item():.6f}")
            model.train()


if __name__ == "__main__":
    main()
