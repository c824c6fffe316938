"""Train a small U-net in plain torch to predict noise, by RMSprop, with averaged weights and a weight for each level of noise."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CLEAN = {
    "base": "torch's group norm, one batch a step",
    "own_norm": "group norm by hand",
    "repeated": "the nearest neighbour's upsampling by repeating values",
    "channels_last": "images in channels-last memory",
    "pointwise_einsum": "the convolution of width 1 as einsum",
    "foreach": "foreach RMSprop",
    "own_rmsprop": "the rule of RMSprop written out",
    "mean_by_hand": "the loss as a sum over its count",
    "halves": "two microbatches of equal size",
    "halves_reversed": "the same microbatches in the opposite order",
    "data_edit": "averages are kept by .data and lerp_",
    "no_average": "no averages",
    "checkpointing": "activation checkpointing of the middle",
    "evaluation": "the averaged weights are evaluated after every second step",
    "renamed": "a subclass of the model's class, of another name",
    "generator": "noise is drawn from the default generator instead of one of its own",
    "silu_by_hand": "SiLU as a product with a sigmoid",
}
FAULTS = {
    "groups": "the norm after the first convolution has 8 groups instead of 4",
    "norm_epsilon": "the norm of the middle has epsilon 1e-6 instead of 1e-5",
    "time_rates": "rates of the embedded time end one step too early",
    "optimizer_epsilon": "RMSprop's epsilon is 1e-6 instead of 1e-8",
}
TIMES = 100


class Norm(nn.GroupNorm):
    """Group norm by torch or by hand."""

    by_hand = False

    def forward(self, input: Tensor) -> Tensor:
        if not self.by_hand:
            return super().forward(input)
        grouped = input.unflatten(1, (self.num_groups, -1)).flatten(2)
        centred = grouped - grouped.mean(-1, keepdim=True)
        found = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.eps)
        return found.view_as(input) * self.weight[:, None, None] + self.bias[:, None, None]


class Block(nn.Module):
    def __init__(self, enter: int, leave: int, on: set[str]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(enter, leave, 3, padding=1)
        self.norm = Norm(4, leave)
        self.norm.by_hand = "own_norm" in on
        self.time = nn.Linear(16, leave)
        self.by_hand = "silu_by_hand" in on

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        found = self.norm(self.conv(x)) + self.time(time)[:, :, None, None]
        return found * found.sigmoid() if self.by_hand else F.silu(found)


class Unet(nn.Module):
    """Noisy images (batch, 2, 12, 12) and times (batch,) to their noise."""

    def __init__(self, on: set[str]) -> None:
        super().__init__()
        self.down = Block(2, 8, on)
        self.middle = Block(8, 16, on)
        self.up = Block(24, 8, on)
        self.out = nn.Conv2d(8, 2, 1)
        self.on = on
        if "groups" in on:
            self.down.norm.num_groups = 8
        if "norm_epsilon" in on:
            self.middle.norm.eps = 1e-6

    def embedded(self, time: Tensor, dtype: torch.dtype) -> Tensor:
        most = 7 if "time_rates" in self.on else 8
        rates = torch.exp(-math.log(10000.0) * torch.arange(8, dtype=torch.float64) / most)
        angles = time[:, None] * rates
        return torch.cat([angles.sin(), angles.cos()], 1).to(dtype)

    def forward(self, noisy: Tensor, time: Tensor) -> Tensor:
        at = self.embedded(time, noisy.dtype)
        first = self.down(noisy, at)
        small = F.avg_pool2d(first, 2)
        if "checkpointing" in self.on:
            small = checkpoint(self.middle, small, at, use_reentrant=False)
        else:
            small = self.middle(small, at)
        if "repeated" in self.on:
            large = small.repeat_interleave(2, 2).repeat_interleave(2, 3)
        else:
            large = F.interpolate(small, scale_factor=2, mode="nearest")
        found = self.up(torch.cat([large, first], 1), at)
        if "pointwise_einsum" in self.on:
            return torch.einsum("oi,bihw->bohw", self.out.weight[:, :, 0, 0], found) + self.out.bias[:, None, None]
        return self.out(found)


class Denoiser(Unet):
    """The U-net under another name."""


class OwnRMSprop(torch.optim.RMSprop):
    """RMSprop's rule written by hand, without momentum."""

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["step"], state["square_avg"] = torch.zeros(()), torch.zeros_like(param)
                state["step"] += 1
                alpha = group["alpha"]
                state["square_avg"].mul_(alpha).add_((1 - alpha) * param.grad.square())
                param.sub_(group["lr"] * param.grad / (state["square_avg"].sqrt() + group["eps"]))


def make_optimizer(model: nn.Module, on: set[str]) -> torch.optim.Optimizer:
    kind = OwnRMSprop if "own_rmsprop" in on else torch.optim.RMSprop
    eps = 1e-6 if "optimizer_epsilon" in on else 1e-8
    return kind(model.parameters(), lr=1e-3, alpha=0.95, eps=eps, foreach="foreach" in on)


def loss_of(found: Tensor, noise: Tensor, kept: Tensor, on: set[str]) -> Tensor:
    weight = (kept / (1 - kept)).clamp(max=5.0).to(found.dtype)
    errors = (found - noise).square()
    weighted = weight[:, None, None, None] * errors
    return weighted.sum() / weighted.numel() if "mean_by_hand" in on else weighted.mean()


class Average:
    """Averages of a model's parameters that follow them by a fifth a step."""

    def __init__(self, model: nn.Module, on: set[str]) -> None:
        self.values, self.on = [param.detach().clone() for param in model.parameters()], on

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for value, param in zip(self.values, model.parameters(), strict=True):
            if "data_edit" in self.on:
                value.data.lerp_(param.data, 0.2)
            else:
                value.copy_(0.8 * value + 0.2 * param)


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
    model = (Denoiser if "renamed" in on else Unet)(on).to(dtype)
    optimizer = make_optimizer(model, on)
    average = None if "no_average" in on else Average(model, on)
    level = torch.cos(torch.linspace(0.02, 1.5, TIMES, dtype=torch.float64)).square()
    for step in range(options.steps):
        draw = None if "generator" in on else torch.Generator().manual_seed(97 * options.seed + step)
        if draw is None:
            torch.manual_seed(97 * options.seed + step)
        images = torch.randn(8, 2, 1, 12, generator=draw).expand(-1, -1, 12, -1)
        noise = torch.randn(8, 2, 12, 12, generator=draw).to(dtype)
        time = torch.randint(0, TIMES, (8,), generator=draw)
        kept = level[time]
        share = kept[:, None, None, None]
        noisy = (share.sqrt() * images + (1 - share).sqrt() * noise.double()).to(dtype)
        if "channels_last" in on:
            noisy = noisy.to(memory_format=torch.channels_last)
        parts = [slice(0, 4), slice(4, 8)] if on & {"halves", "halves_reversed"} else [slice(0, 8)]
        if "halves_reversed" in on:
            parts.reverse()
        total = 0.0
        for part in parts:
            loss = loss_of(model(noisy[part], time[part]), noise[part], kept[part], on) / len(parts)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        if average is not None:
            average.update(model)
        print(f"step {step} loss {total:.12f}", flush=True)
        if "evaluation" in on and step % 2 and average is not None:
            named = dict(zip((name for name, _ in model.named_parameters()), average.values, strict=True))
            with torch.no_grad():
                found = torch.func.functional_call(model, named, (noisy, time))
            print(f"evaluation {(found - noise).square().mean().item():.6f}", flush=True)


if __name__ == "__main__":
    main()
