"""Train a small Gemma2 of transformers: capped scores, a sliding window in every second layer, two microbatches."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2ForCausalLM
from transformers.models.gemma2 import modeling_gemma2

CLEAN = {
    "base": "two microbatches, attention of transformers, gradients clipped by torch",
    "reversed": "microbatches in the opposite order",
    "one_backward": "one backward pass of the sum of both losses",
    "own_attention": "attention written with einsum, heads grouped instead of repeated",
    "own_gelu": "the tanh approximation of GELU written out",
    "own_loss": "the loss by hand from logsumexp",
    "fused": "fused AdamW",
    "foreach": "foreach AdamW",
    "clip_hand": "clipping by hand",
    "checkpointing": "activation checkpointing by transformers",
    "renamed": "a subclass of the model's class, of another name",
    "hooks": "hooks that look at gradients of all parameters",
    "evaluation": "evaluation after every second step",
    "zero_in_place": "gradients are set to zero instead of to None",
    "rate_by_hand": "the schedule is written into the groups instead of by LambdaLR",
}
FAULTS = {
    "exact_gelu": "GELU is exact instead of approximated by tanh",
    "softcap_lost": "scores of layer 0 are not capped",
    "query_scale": "scores are scaled by the root of head_dim instead of that of query_pre_attn_scalar",
    "embed_scale": "the embedding is not multiplied by the root of the hidden size",
    "microbatch_lost": "gradients are set to zero before each microbatch instead of before each step",
}
VOCABULARY, RATE = 64, 4e-3


class Writer(Gemma2ForCausalLM):
    """Gemma2 under another name."""


class Gelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def grouped_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, softcap=None, **_):
    """What `eager_attention_forward` computes, without repeating keys and values."""
    rows, heads, length, width = query.shape
    groups = key.shape[1]
    query = query.reshape(rows, groups, heads // groups, length, width)
    scores = torch.einsum("bghid,bgjd->bghij", query, key) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + attention_mask[:, :, None]
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    found = torch.einsum("bghij,bgjd->bighd", weights, value).reshape(rows, length, heads, width)
    return found, weights.flatten(1, 2)


def make_model(seed: int, dtype: torch.dtype, on: set[str]) -> Gemma2ForCausalLM:
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=1.0,
        final_logit_softcapping=8.0,
        sliding_window=6,
        max_position_embeddings=32,
        initializer_range=0.15,
        use_cache=False,
        pad_token_id=None,
        attn_implementation="eager",
    )
    if "own_attention" in on:
        modeling_gemma2.eager_attention_forward = grouped_attention
    torch.manual_seed(seed)
    model = (Writer if "renamed" in on else Gemma2ForCausalLM)(config).to(dtype)
    for layer in model.model.layers:
        if "own_gelu" in on:
            layer.mlp.act_fn = Gelu()
        if "exact_gelu" in on:
            layer.mlp.act_fn = nn.GELU()
        if "query_scale" in on:
            layer.self_attn.scaling = layer.self_attn.head_dim**-0.5
    if "softcap_lost" in on:
        model.model.layers[0].self_attn.attn_logit_softcapping = None
    if "embed_scale" in on:
        model.model.embed_tokens.embed_scale.fill_(1.0)
    if "checkpointing" in on:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if "hooks" in on:
        for param in model.parameters():
            param.register_hook(lambda grad: None)
    return model.train()


def batch_of(step: int, seed: int) -> Tensor:
    """Tokens (2, 3, 14) of two microbatches; every third token repeats an earlier one."""
    draw = torch.Generator().manual_seed(2003 * seed + step)
    tokens = torch.randint(0, VOCABULARY, (2, 3, 14), generator=draw)
    tokens[..., 3::3] = (tokens[..., 0:-3:3] + 1) % VOCABULARY
    return tokens


def loss_of(logits: Tensor, tokens: Tensor, on: set[str]) -> Tensor:
    logits, labels = logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    if "own_loss" in on:
        return (logits.logsumexp(-1) - logits.gather(-1, labels[:, None])[:, 0]).mean()
    return F.cross_entropy(logits, labels)


def clip(params: list[nn.Parameter], on: set[str]) -> None:
    if "clip_hand" not in on:
        nn.utils.clip_grad_norm_(params, 1.0)
        return
    total = sum(param.grad.square().sum() for param in params).sqrt()
    for param in params:
        param.grad.mul_(torch.clamp(1.0 / (total + 1e-6), max=1.0))


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
    kinds = {"fused": True if "fused" in on else None, "foreach": True if "foreach" in on else None}
    optimizer = torch.optim.AdamW(params, lr=RATE, betas=(0.9, 0.98), weight_decay=0.05, **kinds)

    def share(step: int) -> float:
        return (step + 1) / 2 if step < 2 else 0.5 * (1 + math.cos(math.pi * (step - 2) / 8))

    schedule = None if "rate_by_hand" in on else torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    for step in range(options.steps):
        if schedule is None:
            optimizer.param_groups[0]["lr"] = RATE * share(step)
        parts = list(batch_of(step, options.seed))
        if "reversed" in on:
            parts.reverse()
        losses = []
        for tokens in parts:
            if "microbatch_lost" in on:
                optimizer.zero_grad()
            losses.append(loss_of(model(input_ids=tokens).logits, tokens, on) / len(parts))
            if "one_backward" not in on:
                losses[-1].backward()
        if "one_backward" in on:
            sum(losses).backward()
        clip(params, on)
        optimizer.step()
        optimizer.zero_grad(set_to_none="zero_in_place" not in on)
        if schedule is not None:
            schedule.step()
        print(f"step {step} loss {sum(loss.item() for loss in losses):.12f}", flush=True)
        if "evaluation" in on and step % 2:
            model.eval()
            with torch.no_grad():
                print(f"evaluation {model(input_ids=parts[0]).logits.logsumexp(-1).mean().item():.6f}")
            model.train()


if __name__ == "__main__":
    main()
