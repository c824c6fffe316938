"""Train a small convolutional variational autoencoder, written by hand, by Adagrad, with a growing weight of the divergence."""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.utils.checkpoint import checkpoint

CLEAN = {
    "base": "the decoder's first layer multiplies by a copy of its weight in another layout",
    "no_copy": "the decoder's first layer without a copy",
    "own_bce": "the loss of pixels by softplus",
    "divergence_by_torch": "the divergence by torch.distributions",
    "deviation_by_root": "the deviation as the root of the variance",
    "own_adagrad": "the rule of Adagrad written out",
    "foreach": "foreach Adagrad",
    "clip_hand": "clipping by hand",
    "own_elu": "ELU by expm1 and where",
    "channels_last": "images and convolutions in channels-last memory",
    "halves": "two microbatches of equal size",
    "halves_reversed": "the same microbatches in the opposite order",
    "one_head": "both heads of the encoder as one product of matrices",
    "checkpointing": "activation checkpointing of the decoder",
    "evaluation": "evaluation after every second step",
    "renamed": "a subclass of the model's class, of another name",
    "generator": "noise is drawn from the default generator instead of one of its own",
}
FAULTS = {
    "deviation": "the deviation is the exponential of the logarithm of the variance instead of that of its half",
    "divergence_mean": "the divergence is averaged over latent dimensions instead of summed",
    "optimizer_epsilon": "Adagrad's epsilon is 1e-4 instead of 1e-10",
    "stale_weight": "the copy of the weight is made before the optimizer steps instead of after it",
}
LATENT, CLIP = 6, 20.0


class Product(torch.autograd.Function):
    """x W^T by a copy of W^T; the gradient is that of W."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, copied: Tensor) -> Tensor:
        ctx.save_for_backward(x, copied)
        return x @ copied

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, copied = ctx.saved_tensors
        return grad @ copied.t(), grad.t() @ x, None


class CopiedLinear(nn.Linear):
    """A linear layer that keeps a transposed copy of its weight from one step to the next."""

    copied: Tensor | None = None

    def copy(self) -> None:
        self.copied = self.weight.detach().t().contiguous()

    def forward(self, input: Tensor) -> Tensor:
        if self.copied is None:
            self.copy()
        return Product.apply(input, self.weight, self.copied) + self.bias


class Elu(nn.Module):
    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, torch.expm1(x.clamp(max=0))) if self.by_hand else F.elu(x)


class Autoencoder(nn.Module):
    """Images (batch, 1, 12, 12) and noise (batch, LATENT) to (logits of pixels, means, logarithms of variances)."""

    def __init__(self, on: set[str]) -> None:
        super().__init__()
        elu = Elu("own_elu" in on)
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 8, 4, 2, 1), elu, nn.Conv2d(8, 16, 4, 2, 1), elu, nn.Flatten(), nn.Linear(144, 32), elu
        )
        self.mean = nn.Linear(32, LATENT)
        self.log_variance = nn.Linear(32, LATENT)
        self.enter = (nn.Linear if "no_copy" in on else CopiedLinear)(LATENT, 144)
        self.decoder = nn.Sequential(elu, nn.ConvTranspose2d(16, 8, 4, 2, 1), elu, nn.ConvTranspose2d(8, 1, 4, 2, 1))
        self.on = on

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.encoder(x)
        if "one_head" not in self.on:
            return self.mean(x), self.log_variance(x)
        heads = self.mean, self.log_variance
        weight, bias = torch.cat([head.weight for head in heads]), torch.cat([head.bias for head in heads])
        mean, log_variance = F.linear(x, weight, bias).chunk(2, -1)
        return mean, log_variance

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encode(x)
        deviation = (0.5 * log_variance).exp()
        if "deviation_by_root" in self.on:
            deviation = log_variance.exp().sqrt()
        if "deviation" in self.on:
            deviation = log_variance.exp()
        entered = self.enter(mean + deviation * noise).unflatten(-1, (16, 3, 3))
        if "checkpointing" in self.on:
            return checkpoint(self.decoder, entered, use_reentrant=False), mean, log_variance
        return self.decoder(entered), mean, log_variance


class Compressor(Autoencoder):
    """The autoencoder under another name."""


class OwnAdagrad(torch.optim.Adagrad):
    """Adagrad's rule written by hand."""

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["step"] += 1
                rate = group["lr"] / (1 + (state["step"].item() - 1) * group["lr_decay"])
                state["sum"] += param.grad.square()
                param -= rate * param.grad / (state["sum"].sqrt() + group["eps"])


def make_optimizer(model: nn.Module, on: set[str]) -> torch.optim.Optimizer:
    kind = OwnAdagrad if "own_adagrad" in on else torch.optim.Adagrad
    eps = 1e-4 if "optimizer_epsilon" in on else 1e-10
    optimizer = kind(model.parameters(), lr=0.02, lr_decay=0.05, eps=eps, foreach="foreach" in on)
    if isinstance(model.enter, CopiedLinear):
        copy = lambda *_: model.enter.copy()  # noqa: E731
        if "stale_weight" in on:
            optimizer.register_step_pre_hook(copy)
        else:
            optimizer.register_step_post_hook(copy)
    return optimizer


def batch_of(step: int, seed: int, dtype: torch.dtype, on: set[str]) -> tuple[Tensor, Tensor]:
    """Images (8, 1, 12, 12) of a bright rectangle, and noise (8, LATENT)."""
    draw = None if "generator" in on else torch.Generator().manual_seed(9001 * seed + step)
    if draw is None:
        torch.manual_seed(9001 * seed + step)
    low, size = torch.randint(0, 6, (2, 8, 1), generator=draw), torch.randint(3, 7, (2, 8, 1), generator=draw)
    at = torch.arange(12)
    rows, columns = (at >= low) & (at < low + size)
    images = (rows[:, :, None] & columns[:, None, :])[:, None].to(dtype)
    if "channels_last" in on:
        images = images.to(memory_format=torch.channels_last)
    return images, torch.randn(8, LATENT, generator=draw).to(dtype)


def loss_of(found: tuple[Tensor, Tensor, Tensor], images: Tensor, weight: float, on: set[str]) -> Tensor:
    """The loss of pixels and the weighted divergence, both summed over an image and averaged over images."""
    logits, mean, log_variance = found
    if "own_bce" in on:
        pixels = (F.softplus(logits) - logits * images).sum((1, 2, 3)).mean()
    else:
        pixels = F.binary_cross_entropy_with_logits(logits, images, reduction="sum") / len(images)
    if "divergence_by_torch" in on:
        divergence = kl_divergence(Normal(mean, (0.5 * log_variance).exp()), Normal(0.0, 1.0))
    else:
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance)
    divergence = divergence.mean(-1) if "divergence_mean" in on else divergence.sum(-1)
    return pixels + weight * divergence.mean()


def clip(params: list[nn.Parameter], on: set[str]) -> None:
    if "clip_hand" not in on:
        nn.utils.clip_grad_norm_(params, CLIP)
        return
    total = torch.stack([param.grad.norm() for param in params]).norm()
    for param in params:
        param.grad.mul_((CLIP / (total + 1e-6)).clamp(max=1.0))


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
    torch.manual_seed(options.seed)
    model = (Compressor if "renamed" in on else Autoencoder)(on).to(dtype)
    if "channels_last" in on:
        model = model.to(memory_format=torch.channels_last)
    optimizer, params = make_optimizer(model, on), list(model.parameters())
    for step in range(options.steps):
        images, noise = batch_of(step, options.seed, dtype, on)
        parts = [slice(0, 4), slice(4, 8)] if on & {"halves", "halves_reversed"} else [slice(0, 8)]
        if "halves_reversed" in on:
            parts.reverse()
        total, weight = 0.0, 2.0 * min(1.0, (step + 1) / 4)
        for part in parts:
            loss = loss_of(model(images[part], noise[part]), images[part], weight, on) / len(parts)
            loss.backward()
            total += loss.item()
        clip(params, on)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {total:.12f}", flush=True)
        if "evaluation" in on and step % 2:
            model.eval()
            with torch.no_grad():
                print(f"evaluation {model(images, torch.zeros_like(noise))[0].sigmoid().mean().item():.6f}")
            model.train()


if __name__ == "__main__":
    main()
