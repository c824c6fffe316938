"""Train a small vision transformer of transformers by SGD, with mixed images, smoothed labels, a gradient scaler and clipping."""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

CLEAN = {
    "base": "a scaler of torch, gradients clipped by torch after their scale is taken out",
    "no_scaler": "no scaler",
    "smaller_scale": "the scale is 64 instead of 4096",
    "unscaled_by_hand": "the loss is scaled and the scale taken out by hand",
    "clip_hand": "clipping by hand",
    "eager": "attention by matrix products",
    "own_smoothing": "smoothed labels by hand from log_softmax",
    "foreach": "foreach SGD",
    "fused": "fused SGD",
    "own_sgd": "the rule of SGD written out",
    "halves": "two microbatches of equal size",
    "halves_reversed": "the same microbatches in the opposite order",
    "channels_last": "images in channels-last memory",
    "unfolded_patches": "the embedding of patches as a product of matrices",
    "evaluation": "evaluation after every second step",
    "renamed": "a subclass of the model's class, of another name",
    "checkpointing": "activation checkpointing by transformers",
}
FAULTS = {
    "clipped_scaled": "gradients are clipped before the scale is taken out",
    "no_positions": "positions are not added to patches",
    "norm_epsilon": "the first norm of layer 0 has epsilon 1e-5 instead of 1e-12",
    "other_permutation": "labels are mixed by another permutation than images",
    "frozen_trains": "the embedding of patches is trained, although it should be frozen",
    "weight_decay_twice": "weight decay is added to gradients by hand, and by the optimizer too",
}
CLASSES = 6


class Classifier(ViTForImageClassification):
    """The vision transformer under another name."""


class Patches(nn.Conv2d):
    """The same parameters and the same function as a convolution whose stride is its kernel's size."""

    def forward(self, input: Tensor) -> Tensor:
        rows = F.unfold(input, self.kernel_size, stride=self.stride)
        found = self.weight.flatten(1) @ rows + self.bias[:, None]
        side = input.shape[-1] // self.kernel_size[0]
        return found.unflatten(-1, (side, side))


class OwnSGD(torch.optim.SGD):
    """SGD's rule with momentum and Nesterov's variant, written by hand."""

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                grad = param.grad + group["weight_decay"] * param
                state = self.state[param]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = grad.clone()
                else:
                    state["momentum_buffer"].mul_(group["momentum"]).add_(grad)
                param.sub_(group["lr"] * (grad + group["momentum"] * state["momentum_buffer"]))


def make_model(seed: int, dtype: torch.dtype, on: set[str]) -> ViTForImageClassification:
    config = ViTConfig(
        image_size=16,
        patch_size=4,
        num_channels=3,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.08,
        attn_implementation="eager" if "eager" in on else "sdpa",
    )
    torch.manual_seed(seed)
    model = (Classifier if "renamed" in on else ViTForImageClassification)(config).to(dtype).train()
    embeddings = model.vit.embeddings
    for param in embeddings.patch_embeddings.parameters():
        param.requires_grad_("frozen_trains" in on)
    if "unfolded_patches" in on:
        embeddings.patch_embeddings.projection.__class__ = Patches
    if "no_positions" in on:
        embeddings.register_forward_hook(lambda module, args, output: output - module.position_embeddings)
    if "norm_epsilon" in on:
        next(each for each in model.modules() if isinstance(each, nn.LayerNorm)).eps = 1e-5
    if "checkpointing" in on:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def make_optimizer(model: nn.Module, on: set[str]) -> torch.optim.Optimizer:
    params = [each for each in model.parameters() if each.requires_grad]
    if "own_sgd" in on:
        return OwnSGD(params, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True)
    kinds = {"foreach": "foreach" in on, "fused": True if "fused" in on else None}
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True, **kinds)


def batch_of(step: int, seed: int, dtype: torch.dtype, on: set[str]) -> tuple[Tensor, Tensor]:
    """Images (8, 3, 16, 16), each mixed with another one, and probabilities of classes (8, CLASSES)."""
    draw = torch.Generator().manual_seed(6007 * seed + step)
    images = torch.randn(8, 3, 16, 16, generator=draw)
    classes = torch.randint(0, CLASSES, (8,), generator=draw)
    images += classes[:, None, None, None] / CLASSES
    labels = F.one_hot(classes, CLASSES).float()
    order, share = torch.randperm(8, generator=draw), 0.3
    images = (1 - share) * images + share * images[order]
    if "other_permutation" in on:
        order = torch.randperm(8, generator=draw)
    labels = (1 - share) * labels + share * labels[order]
    if "channels_last" in on:
        images = images.to(memory_format=torch.channels_last)
    return images.to(dtype), labels.to(dtype)


def loss_of(logits: Tensor, labels: Tensor, on: set[str]) -> Tensor:
    if "own_smoothing" in on:
        smoothed = 0.9 * labels + 0.1 / CLASSES
        return -(smoothed * logits.log_softmax(-1)).sum(-1).mean()
    return F.cross_entropy(logits, labels, label_smoothing=0.1)


def clip(params: list[nn.Parameter], on: set[str]) -> None:
    if "clip_hand" not in on:
        nn.utils.clip_grad_norm_(params, 0.5)
        return
    total = torch.stack([param.grad.norm() for param in params]).norm()
    for param in params:
        param.grad.mul_((0.5 / (total + 1e-6)).clamp(max=1.0))


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
    optimizer = make_optimizer(model, on)
    params = [each for each in model.parameters() if each.requires_grad]
    by_hand = "unscaled_by_hand" in on
    scale = 64.0 if "smaller_scale" in on else 4096.0
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled="no_scaler" not in on and not by_hand)
    for step in range(options.steps):
        images, labels = batch_of(step, options.seed, dtype, on)
        parts = [slice(0, 8)]
        if on & {"halves", "halves_reversed"}:
            parts = [slice(0, 4), slice(4, 8)]
        if "halves_reversed" in on:
            parts.reverse()
        total = 0.0
        for part in parts:
            loss = loss_of(model(pixel_values=images[part]).logits, labels[part], on) / len(parts)
            (loss * scale if by_hand else scaler.scale(loss)).backward()
            total += loss.item()
        if by_hand:
            for param in params:
                param.grad /= scale
        if "clipped_scaled" in on:
            clip(params, on)
            scaler.unscale_(optimizer)
        else:
            scaler.unscale_(optimizer)
            clip(params, on)
        if "weight_decay_twice" in on:
            for param in params:
                param.grad.add_(param.detach(), alpha=0.01)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(f"step {step} loss {total:.12f}", flush=True)
        if "evaluation" in on and step % 2:
            model.eval()
            with torch.no_grad():
                print(f"evaluation {model(pixel_values=images).logits.argmax(-1).float().mean().item():.6f}")
            model.train()


if __name__ == "__main__":
    main()
