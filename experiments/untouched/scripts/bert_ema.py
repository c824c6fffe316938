"""Masked language modelling with a small BERT of transformers, in a loop like a Trainer's, evaluated with averaged weights.

Every third step the averaged weights are swapped in, the model is evaluated, and the trained weights are swapped back.
"""

import argparse
import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, get_linear_schedule_with_warmup
from transformers.models.bert import modeling_bert

CLEAN = {
    "base": "averages are swapped in by copying tensors",
    "swap_data": "averages are swapped in by exchanging the storage of tensors",
    "averaged_model": "averages are kept by torch.optim.swa_utils.AveragedModel and never swapped in",
    "no_evaluation": "averages are kept, and nothing is evaluated",
    "eager": "attention by matrix products",
    "fused": "fused AdamW",
    "foreach": "foreach AdamW",
    "loss_by_model": "the loss that the model computes from labels",
    "sum_over_count": "the loss as a sum over labels by their number",
    "halves": "two microbatches, each weighted by its number of labels",
    "halves_reversed": "the same microbatches in the opposite order",
    "clip_torch": "gradients are clipped by torch to norm 1",
    "clip_hand": "gradients are clipped by hand to norm 1",
    "group_per_param": "one group of parameters for each parameter",
    "two_schedulers": "the schedule as a product of two schedulers",
}
FAULTS = {
    "not_restored": "after the first evaluation the trained weights are not swapped back",
    "dropout_left_on": "hidden dropout of 0.1",
    "mask_ignored": "attention also sees padding",
    "tanh_gelu": "GELU by tanh instead of by erf",
    "padding_counted": "positions without a label count as label 0",
    "smoothing": "labels are smoothed by 0.1",
    "bias_decay": "the list of what is not decayed has outdated names, so that all is decayed",
    "tied_head_detached": "the head uses a detached copy of the embedding",
    "adam_eps": "AdamW epsilon 1e-6 instead of 1e-8",
    "eval_dropout_state": "the attention output of layer 1 keeps dropping a tenth from the first evaluation on",
    "short_warmup": "two steps of warm-up instead of four",
    "norm_in_half": "the norm of layer 0's attention computes in float16",
}
VOCABULARY, WIDTH = 90, 32


def without_mask(*args, **kwargs) -> None:
    return None


class HalfNorm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        half = F.layer_norm(input.half(), self.normalized_shape, self.weight.half(), self.bias.half(), self.eps)
        return half.to(input.dtype)


def make_model(seed: int, dtype: torch.dtype, on: set[str]) -> BertForMaskedLM:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=40,
        hidden_dropout_prob=0.1 if "dropout_left_on" in on else 0.0,
        attention_probs_dropout_prob=0.0,
        hidden_act="gelu_pytorch_tanh" if "tanh_gelu" in on else "gelu",
        initializer_range=0.1,
        attn_implementation="eager" if "eager" in on else "sdpa",
    )
    if "mask_ignored" in on:
        modeling_bert.create_bidirectional_mask = without_mask
    torch.manual_seed(seed)
    model = BertForMaskedLM(config).to(dtype)
    if "tied_head_detached" in on:
        head = model.cls.predictions.decoder
        head.forward = lambda hidden: F.linear(hidden, head.weight.detach(), head.bias)
    if "norm_in_half" in on:
        norm = model.bert.encoder.layer[0].attention.output.LayerNorm
        norm.__class__ = HalfNorm
    return model


def make_optimizer(model: nn.Module, on: set[str]) -> torch.optim.Optimizer:
    no_decay = ("gamma", "beta") if "bias_decay" in on else ("LayerNorm.weight", "bias")
    decayed = [param for name, param in model.named_parameters() if not name.endswith(no_decay)]
    others = [param for name, param in model.named_parameters() if name.endswith(no_decay)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    if "group_per_param" in on:
        groups = [{**group, "params": [param]} for group in groups for param in group["params"]]
    groups = [group for group in groups if group["params"]]
    eps = 1e-6 if "adam_eps" in on else 1e-8
    return torch.optim.AdamW(groups, lr=2e-3, eps=eps, fused=True if "fused" in on else None, foreach="foreach" in on)


class Average:
    """An exponential moving average of a model's parameters."""

    def __init__(self, model: nn.Module, decay: float = 0.9) -> None:
        self.decay = decay
        self.values = [param.detach().clone() for param in model.parameters()]

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for value, param in zip(self.values, model.parameters(), strict=True):
            value.lerp_(param, 1 - self.decay)

    @torch.no_grad()
    def swap(self, model: nn.Module, *, exchanges: bool) -> None:
        for i, param in enumerate(model.parameters()):
            if exchanges:
                param.data, self.values[i] = self.values[i], param.data
            else:
                kept = param.detach().clone()
                param.copy_(self.values[i])
                self.values[i].copy_(kept)


def batch_of(step: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, attention mask, labels) of 6 samples of 12 to 24 tokens; a label of -100 is none."""
    draw = torch.Generator().manual_seed(104729 * seed + step)
    tokens = torch.randint(5, VOCABULARY, (6, 24), generator=draw)
    lengths = torch.randint(12, 25, (6, 1), generator=draw)
    mask = (torch.arange(24)[None] < lengths).long()
    is_hidden = (torch.rand(6, 24, generator=draw) < 0.3) & mask.bool()
    is_hidden[:, 1] = True
    labels = tokens.masked_fill(~is_hidden, -100)
    return tokens.masked_fill(is_hidden, 3) * mask, mask, labels


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor], on: set[str]) -> Tensor:
    tokens, mask, labels = batch
    if "loss_by_model" in on:
        return model(input_ids=tokens, attention_mask=mask, labels=labels).loss
    logits = model(input_ids=tokens, attention_mask=mask).logits.flatten(0, 1)
    if "padding_counted" in on:
        labels = labels.clamp(min=0)
    if "sum_over_count" in on:
        return F.cross_entropy(logits, labels.flatten(), reduction="sum") / (labels != -100).sum()
    return F.cross_entropy(logits, labels.flatten(), label_smoothing=0.1 if "smoothing" in on else 0.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", default="base", help="names joined by +")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", type=int, default=7)
    options = parser.parse_args()
    on = set(options.variant.split("+"))
    assert on <= CLEAN.keys() | FAULTS.keys(), on
    torch.set_num_threads(1)
    model = make_model(options.seed, getattr(torch, options.dtype), on)
    optimizer = make_optimizer(model, on)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2 if "short_warmup" in on else 4, 20)
    if "two_schedulers" in on:
        constant = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0, total_iters=1)
        scheduler = torch.optim.lr_scheduler.ChainedScheduler([scheduler, constant])
    average = Average(model)
    kept = torch.optim.swa_utils.AveragedModel(copy.deepcopy(model)) if "averaged_model" in on else None
    model.train()
    for step in range(options.steps):
        batch = batch_of(step, options.seed)
        if on & {"halves", "halves_reversed"}:
            num_labels, total = int((batch[2] != -100).sum()), 0.0
            parts = [tuple(each[rows] for each in batch) for rows in (slice(0, 2), slice(2, 6))]
            for part in reversed(parts) if "halves_reversed" in on else parts:
                weight = int((part[2] != -100).sum()) / num_labels
                loss = loss_of(model, part, on) * weight  # type: ignore[arg-type]
                loss.backward()
                total += loss.item()
        else:
            loss = loss_of(model, batch, on)
            loss.backward()
            total = loss.item()
        if "clip_torch" in on:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if "clip_hand" in on:
            grads = [param.grad for param in model.parameters() if param.grad is not None]
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
            for grad in grads:
                grad *= torch.clamp(1.0 / (norm + 1e-6), max=1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        average.update(model)
        if kept is not None:
            kept.update_parameters(model)
        print(f"step {step} loss {total:.12f}", flush=True)
        if step % 3 == 2 and not on & {"averaged_model", "no_evaluation"}:
            average.swap(model, exchanges="swap_data" in on)
            model.eval()
            with torch.no_grad():
                print(f"evaluation {loss_of(model, batch_of(step + 1000, 0), on).item():.6f}")
            model.train()
            if "not_restored" not in on or step > 2:
                average.swap(model, exchanges="swap_data" in on)
            if "eval_dropout_state" in on:
                model.bert.encoder.layer[1].attention.output.dropout.p = 0.1


if __name__ == "__main__":
    main()
