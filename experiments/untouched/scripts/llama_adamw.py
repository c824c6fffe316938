"""Pretrain a small Llama of transformers: loop by hand, AdamW, cosine schedule, gradients clipped by hand."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

CLEAN = {
    "base": "SDPA, AdamW by loops over parameters, clipping by hand",
    "eager": "attention by matrix products",
    "math_attention": "SDPA's math kernel",
    "clip_torch": "clipping by torch.nn.utils.clip_grad_norm_",
    "foreach": "foreach AdamW",
    "fused": "fused AdamW",
    "subclass": "a subclass of AdamW that adds nothing",
    "renamed": "a subclass of the model's class, of another name",
    "checkpointing": "activation checkpointing of each layer",
    "later_positions": "all positions start at 11: rotary embeddings see differences of positions alone",
    "own_loss": "cross-entropy as logsumexp minus the logit of the label",
    "evaluation": "evaluation on other data after every third step",
    "hooks": "forward hooks on every layer, which log",
    "threads": "two threads inside an operator",
    "one_group": "no weight decay at all, in one group of parameters; goes with two_groups",
    "two_groups": "no weight decay at all, in two groups of parameters",
}
FAULTS = {
    "norm_eps": "RMSNorm epsilon 1e-5 instead of 1e-6",
    "rope_base": "rotary base 500000 instead of 10000",
    "rope_halves": "rotary pairs are neighbours instead of halves",
    "attention_scale": "layer 1 scales scores by 1 / head_dim",
    "mask_off_by_one": "each token also sees the next one (with eager)",
    "kv_tiled": "key and value heads are tiled instead of repeated (with eager)",
    "swapped_layers": "layers 0 and 1 are applied in the other order",
    "schedule_first": "the scheduler steps before the optimizer",
    "decay_everything": "norms are decayed too",
    "clip_each": "each gradient is clipped by its own norm",
}


class Scheduled(torch.optim.AdamW):
    """AdamW under another name."""


class MyLanguageModel(LlamaForCausalLM):
    """Llama under another name."""


def rotate_neighbours(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def tile_kv(hidden: torch.Tensor, times: int) -> torch.Tensor:
    return hidden.repeat(1, times, 1, 1)


def see_next(*args, **kwargs) -> torch.Tensor:
    embeds = kwargs["inputs_embeds"]
    length = embeds.shape[1]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(2)
    mask = torch.zeros(length, length, dtype=embeds.dtype).masked_fill(hidden, torch.finfo(embeds.dtype).min)
    return mask[None, None].expand(len(embeds), 1, length, length)


def make_model(seed: int, dtype: torch.dtype, on: set[str]) -> LlamaForCausalLM:
    if "rope_halves" in on:
        modeling_llama.rotate_half = rotate_neighbours
    if "kv_tiled" in on:
        modeling_llama.repeat_kv = tile_kv
    if "mask_off_by_one" in on:
        modeling_llama.create_causal_mask = see_next
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.1,
        rms_norm_eps=1e-5 if "norm_eps" in on else 1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0 if "rope_base" in on else 10000.0},
        attn_implementation="eager" if "eager" in on else "sdpa",
        use_cache=False,
    )
    torch.manual_seed(seed)
    model = (MyLanguageModel if "renamed" in on else LlamaForCausalLM)(config).to(dtype)
    layers = model.model.layers
    if "attention_scale" in on:
        attention = layers[1].self_attn
        attention.scaling = 1 / attention.head_dim
    if "swapped_layers" in on:
        first, second = layers[0], layers[1]
        first.forward, second.forward = second.forward, first.forward
    if "later_positions" in on:
        rotary = model.model.rotary_emb
        given = rotary.forward
        rotary.forward = lambda x, position_ids, *args, **kwargs: given(x, position_ids + 11, *args, **kwargs)
    if "checkpointing" in on:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if "hooks" in on:
        seen: list[float] = []
        for layer in layers:
            layer.register_forward_hook(lambda module, args, output: seen.append(float(output[0].detach().mean())))
    return model


def make_optimizer(model: nn.Module, on: set[str]) -> torch.optim.Optimizer:
    decay = 0.0 if on & {"one_group", "two_groups"} else 0.1
    matrices = [param for param in model.parameters() if param.ndim > 1]
    vectors = [param for param in model.parameters() if param.ndim < 2]
    rest = decay if "decay_everything" in on else 0.0
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": rest}]
    if "one_group" in on:
        groups = [{"params": list(model.parameters()), "weight_decay": decay}]
    kind = Scheduled if "subclass" in on else torch.optim.AdamW
    return kind(groups, lr=3e-3, betas=(0.9, 0.95), foreach="foreach" in on, fused=True if "fused" in on else None)


def clip_by_hand(params: list[nn.Parameter], most: float) -> None:
    grads = [param.grad for param in params if param.grad is not None]
    norm = torch.sqrt(sum((grad.pow(2).sum() for grad in grads), torch.zeros((), dtype=grads[0].dtype)))
    scale = torch.clamp(most / (norm + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(scale)


def loss_of(model: nn.Module, tokens: torch.Tensor, on: set[str]) -> torch.Tensor:
    logits, labels = model(input_ids=tokens).logits[:, :-1], tokens[:, 1:]
    if "own_loss" in on:
        picked = logits.gather(-1, labels[..., None])[..., 0]
        return (logits.logsumexp(-1) - picked).mean()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", default="base", help="names joined by +")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    on = set(options.variant.split("+"))
    assert on <= CLEAN.keys() | FAULTS.keys(), on
    torch.set_num_threads(2 if "threads" in on else 1)
    model = make_model(options.seed, getattr(torch, options.dtype), on)
    optimizer = make_optimizer(model, on)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.1 + 0.45 * (1 + math.cos(math.pi * step / options.steps))
    )
    data = torch.Generator().manual_seed(options.seed + 1000)
    params = list(model.parameters())
    for step in range(options.steps):
        tokens = torch.randint(0, 96, (4, 24), generator=data)
        if "math_attention" in on:
            with sdpa_kernel(SDPBackend.MATH):
                loss = loss_of(model, tokens, on)
        else:
            loss = loss_of(model, tokens, on)
        optimizer.zero_grad()
        loss.backward()
        if "clip_torch" in on:
            nn.utils.clip_grad_norm_(params, 0.3)
        elif "clip_each" in on:
            for param in params:
                clip_by_hand([param], 0.3)
        else:
            clip_by_hand(params, 0.3)
        if "schedule_first" in on:
            scheduler.step()
            optimizer.step()
        else:
            optimizer.step()
            scheduler.step()
        print(f"step {step} loss {loss.item():.12f}", flush=True)
        if "evaluation" in on and step % 3 == 2:
            model.eval()
            with torch.no_grad():
                held_out = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(step))
                print(f"evaluation {loss_of(model, held_out, on).item():.6f}")
            model.train()


if __name__ == "__main__":
    main()
