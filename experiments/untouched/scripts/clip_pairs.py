"""Train a small CLIP of transformers on pairs of images and captions: a learned temperature, averaged weights, clipping."""

import argparse
import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel
from transformers.models.clip import modeling_clip

CLEAN = {
    "base": "attention by sdpa, the loss of both directions from logits",
    "eager": "attention by matrix products",
    "loss_by_model": "the loss of transformers",
    "own_loss": "the loss by hand from logsumexp",
    "silu": "the approximated GELU by SiLU",
    "unfolded": "the embedding of patches as a product of matrices",
    "fused": "fused AdamW",
    "foreach": "foreach AdamW",
    "clip_hand": "clipping by hand",
    "no_average": "no averaged weights",
    "average_by_swa": "averages by torch.optim.swa_utils",
    "scaler": "a gradient scaler, gradients clipped after their scale is taken out",
    "text_first": "the groups of parameters in another order",
    "checkpointing": "activation checkpointing by transformers",
    "renamed": "a subclass of the model's class, of another name",
    "evaluation": "the averaged weights are evaluated after every second step",
}
FAULTS = {
    "one_direction": "only the loss of images to captions is counted",
    "pooled_last": "captions are pooled at their last position instead of at their end token",
    "half_mlp": "the MLP of layer 0 of the images computes in bfloat16",
    "swapped_projections": "keys and values of layer 1 of the captions are loaded into each other's place",
    "causal_lost": "tokens of captions attend to later ones (with eager)",
}
VOCABULARY, LENGTH, END = 50, 10, 49


class Matcher(CLIPModel):
    """CLIP under another name."""


class Silu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(1.702 * x) / 1.702


class Patches(nn.Conv2d):
    """The same function as a convolution whose stride is its kernel's size."""

    def forward(self, input: Tensor) -> Tensor:
        found = self.weight.flatten(1) @ F.unfold(input, self.kernel_size, stride=self.stride)
        side = input.shape[-1] // self.kernel_size[0]
        return found.unflatten(-1, (side, side))


def half(linear: nn.Linear):
    """A forward of this layer in bfloat16."""
    return lambda x: F.linear(x.bfloat16(), linear.weight.bfloat16(), linear.bias.bfloat16()).to(x.dtype)


def make_model(seed: int, dtype: torch.dtype, on: set[str]) -> CLIPModel:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "eos_token_id": END, "bos_token_id": 1}
    config = CLIPConfig(
        text_config={**sizes, **text, "pad_token_id": 0, "initializer_factor": 4.0},
        vision_config={**sizes, "image_size": 16, "patch_size": 4, "initializer_factor": 4.0},
        projection_dim=16,
        initializer_factor=4.0,
        attn_implementation="eager" if on & {"eager", "causal_lost"} else "sdpa",
    )
    if "causal_lost" in on:
        modeling_clip.create_causal_mask = lambda **_: None
    torch.manual_seed(seed)
    model = (Matcher if "renamed" in on else CLIPModel)(config).to(dtype).train()
    layers = [*model.vision_model.encoder.layers, *model.text_model.encoder.layers]
    if "silu" in on:
        for layer in layers:
            layer.mlp.activation_fn = Silu()
    if "unfolded" in on:
        model.vision_model.embeddings.patch_embedding.__class__ = Patches
    if "half_mlp" in on:
        for linear in (layers[0].mlp.fc1, layers[0].mlp.fc2):
            linear.forward = half(linear)
    if "swapped_projections" in on:
        attention = model.text_model.encoder.layers[1].self_attn
        key, value = attention.k_proj.state_dict(), attention.v_proj.state_dict()
        key, value = copy.deepcopy(key), copy.deepcopy(value)
        attention.k_proj.load_state_dict(value)
        attention.v_proj.load_state_dict(key)
    if "checkpointing" in on:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def make_optimizer(model: nn.Module, on: set[str]) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    groups = [
        {"params": [param for _, param in named if param.ndim > 1]},
        {"params": [param for name, param in named if param.ndim == 1], "weight_decay": 0.0},
        {"params": [param for name, param in named if param.ndim == 0], "weight_decay": 0.0, "lr": 1e-2},
    ]
    if "text_first" in on:
        groups.reverse()
    kinds = {"fused": True if "fused" in on else None, "foreach": True if "foreach" in on else None}
    return torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2, **kinds)


def batch_of(step: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Captions (8, LENGTH) with an end token and padding after it, and images (8, 3, 16, 16) that they state in part."""
    draw = torch.Generator().manual_seed(8009 * seed + step)
    tokens = torch.randint(2, END, (8, LENGTH), generator=draw)
    ends = torch.randint(4, LENGTH - 1, (8, 1), generator=draw)
    at = torch.arange(LENGTH)
    tokens = torch.where(at < ends, tokens, torch.where(at == ends, END, 0))
    images = torch.randn(8, 3, 16, 16, generator=draw)
    images += (tokens[:, 1] / VOCABULARY)[:, None, None, None] * torch.linspace(-2, 2, 16)
    return tokens, images.to(dtype)


def loss_of(logits: Tensor, on: set[str]) -> Tensor:
    """The mean loss of captions to images and of images to captions, from logits of captions (rows) and images (columns)."""
    right = torch.arange(len(logits))
    if "one_direction" in on:
        return F.cross_entropy(logits.t(), right)
    if "own_loss" in on:
        return 0.5 * (logits.logsumexp(0) + logits.logsumexp(1) - 2 * logits.diagonal()).mean()
    return (F.cross_entropy(logits, right) + F.cross_entropy(logits.t(), right)) / 2


def clip(params: list[nn.Parameter], on: set[str]) -> None:
    if "clip_hand" not in on:
        nn.utils.clip_grad_norm_(params, 0.5)
        return
    total = torch.stack([param.grad.norm() for param in params]).norm()
    for param in params:
        param.grad.mul_((0.5 / (total + 1e-6)).clamp(max=1.0))


class Average:
    """Averages of a model's parameters that follow them by a fifth a step."""

    def __init__(self, model: nn.Module, on: set[str]) -> None:
        self.model = None
        if "average_by_swa" in on:
            self.model = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda old, new, count: old.lerp(new, 0.2))
        self.values = [param.detach().clone() for param in model.parameters()]

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        if self.model is not None:
            self.model.update_parameters(model)
        for value, param in zip(self.values, model.parameters(), strict=True):
            value.lerp_(param, 0.2)


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
    dtype = getattr(torch, options.dtype)
    model = make_model(options.seed, dtype, on)
    if "pooled_last" in on:
        pool = model.text_model.forward

        def pooled(**given):
            found = pool(**given)
            found.pooler_output = found.last_hidden_state[:, -1]
            return found

        model.text_model.forward = pooled
    optimizer = make_optimizer(model, on)
    params = list(model.parameters())
    average = None if "no_average" in on else Average(model, on)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, enabled="scaler" in on)
    for step in range(options.steps):
        tokens, images = batch_of(step, options.seed, dtype)
        found = model(input_ids=tokens, pixel_values=images, return_loss="loss_by_model" in on)
        loss = found.loss if "loss_by_model" in on else loss_of(found.logits_per_text, on)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip(params, on)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        with torch.no_grad():
            model.logit_scale.clamp_(max=4.6)
        if average is not None:
            average.update(model)
        print(f"step {step} loss {loss.item():.12f}", flush=True)
        if "evaluation" in on and step % 2 and average is not None:
            values = dict(zip((name for name, _ in model.named_parameters()), average.values, strict=True))
            given = {"input_ids": tokens, "pixel_values": images}
            with torch.no_grad():
                logits = torch.func.functional_call(model, values, (), given).logits_per_image
            print(f"evaluation {logits.argmax(-1).double().mean().item():.6f}", flush=True)


if __name__ == "__main__":
    main()
