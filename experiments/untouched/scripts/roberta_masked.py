"""Train a small RoBERTa of transformers to fill masks: padding, a learning rate for each layer, Adam and decay by the script.

A step's loss is the sum over masked tokens of both microbatches by their number.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import RobertaConfig, RobertaForMaskedLM

CLEAN = {
    "base": "attention by sdpa, decoupled weight decay by the script, gradients clipped by value",
    "reversed": "microbatches in the opposite order",
    "one_backward": "one backward pass of the sum of both losses",
    "eager": "attention by matrix products",
    "own_loss": "the loss by hand from log_softmax",
    "fused": "fused Adam",
    "foreach": "foreach Adam",
    "positions_given": "positions are counted by the script",
    "clip_by_clamp": "values are clipped by clamp_",
    "one_group_each": "a group for each parameter",
    "checkpointing": "activation checkpointing by transformers",
    "renamed": "a subclass of the model's class, of another name",
    "evaluation": "evaluation after every second step",
}
FAULTS = {
    "positions_from_zero": "positions begin at 0 instead of after the padding's index",
    "padding_labels": "padded positions have the padding token as their label instead of -100",
    "mean_of_means": "each microbatch is averaged over its own labels",
    "decay_without_rate": "weights are decayed by the coefficient alone instead of its product with the learning rate",
    "head_detached": "the head's use of the tied weight carries no gradient",
}
VOCABULARY, LENGTH, PAD, MASK = 60, 16, 1, 59
RATE, DECAY, MOST = 3e-3, 0.01, 0.02


class Filler(RobertaForMaskedLM):
    """RoBERTa under another name."""


def make_model(seed: int, dtype: torch.dtype, on: set[str]) -> RobertaForMaskedLM:
    config = RobertaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=LENGTH + 2,
        type_vocab_size=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.12,
        pad_token_id=PAD,
        attn_implementation="eager" if "eager" in on else "sdpa",
    )
    torch.manual_seed(seed)
    model = (Filler if "renamed" in on else RobertaForMaskedLM)(config).to(dtype)
    if "positions_from_zero" in on:
        from_zero = lambda tokens, *_: torch.arange(tokens.shape[1]).expand(len(tokens), -1)  # noqa: E731
        model.roberta.embeddings.create_position_ids_from_input_ids = from_zero
    if "head_detached" in on:
        head = model.lm_head.decoder
        head.forward = lambda x: F.linear(x, head.weight.detach(), head.bias)
    if "checkpointing" in on:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def make_optimizer(model: nn.Module, on: set[str]) -> torch.optim.Optimizer:
    """Adam, whose learning rate falls by a fifth from each layer to the one below it."""
    depths = {"embeddings": 3, "encoder.layer.0": 2, "encoder.layer.1": 1}
    groups: dict[int, list[nn.Parameter]] = {}
    for name, param in model.named_parameters():
        depth = next((depth for part, depth in depths.items() if part in name), 0)
        groups.setdefault(depth, []).append(param)
    rows = [{"params": params, "lr": RATE * 0.8**depth} for depth, params in sorted(groups.items())]
    if "one_group_each" in on:
        rows = [{"params": [param], "lr": row["lr"]} for row in rows for param in row["params"]]
    kinds = {"fused": True if "fused" in on else None, "foreach": True if "foreach" in on else None}
    return torch.optim.Adam(rows, betas=(0.9, 0.98), eps=1e-6, **kinds)


@torch.no_grad()
def decay(optimizer: torch.optim.Optimizer, on: set[str]) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.ndim > 1:
                param.mul_(1 - DECAY * (1.0 if "decay_without_rate" in on else group["lr"]))


def microbatches_of(step: int, seed: int, on: set[str]) -> list[tuple[Tensor, Tensor]]:
    """(tokens, labels) of two microbatches (4, LENGTH), whose shares of masks differ; a label of -100 is not counted."""
    draw = torch.Generator().manual_seed(4007 * seed + step)
    found = []
    for share in (0.15, 0.4):
        tokens = torch.randint(2, MASK, (4, LENGTH), generator=draw)
        tokens[:, 1::2] = (tokens[:, ::2] - 2 + 5) % (MASK - 2) + 2
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (4, 1), generator=draw)
        is_token = torch.arange(LENGTH) < lengths
        masked = (torch.rand(4, LENGTH, generator=draw) < share) & is_token
        masked[:, 2] = True
        labels = tokens.masked_fill(~masked, -100)
        if "padding_labels" in on:
            labels = labels.masked_fill(~is_token, PAD)
        found.append((tokens.masked_fill(masked, MASK).masked_fill(~is_token, PAD), labels))
    return found


def loss_of(logits: Tensor, labels: Tensor, num_labels: int, on: set[str]) -> Tensor:
    if "mean_of_means" in on:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) / 2
    if "own_loss" in on:
        counted = labels >= 0
        return -logits.log_softmax(-1)[counted].gather(-1, labels[counted][:, None]).sum() / num_labels
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_labels


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
    params = list(model.parameters())
    optimizer = make_optimizer(model, on)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, total_iters=8)
    for step in range(options.steps):
        batches = microbatches_of(step, options.seed, on)
        num_labels = sum(int((labels >= 0).sum()) for _, labels in batches)
        if "reversed" in on:
            batches.reverse()
        losses = []
        for tokens, labels in batches:
            is_token = (tokens != PAD).long()
            given = {"input_ids": tokens, "attention_mask": is_token}
            if "positions_given" in on:
                given["position_ids"] = is_token.cumsum(1) * is_token + PAD
            losses.append(loss_of(model(**given).logits, labels, num_labels, on))
            if "one_backward" not in on:
                losses[-1].backward()
        if "one_backward" in on:
            sum(losses).backward()
            for param in params:
                param.grad.clamp_(-MOST, MOST)
        else:
            nn.utils.clip_grad_value_(params, MOST)
        decay(optimizer, on)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"step {step} loss {sum(loss.item() for loss in losses):.12f}", flush=True)
        if "evaluation" in on and step % 2:
            model.eval()
            with torch.no_grad():
                print(f"evaluation {model(input_ids=tokens, attention_mask=is_token).logits.mean().item():.6f}")
            model.train()


if __name__ == "__main__":
    main()
