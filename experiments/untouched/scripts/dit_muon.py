"""Train a small diffusion transformer, written by hand, by flow matching: Muon for matrices, AdamW for the rest, averages."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CLEAN = {
    "base": "attention by sdpa, Muon by hand, AdamW of torch",
    "own_attention": "attention by matrix products",
    "own_norm": "norms by hand",
    "own_adamw": "the rule of AdamW written out",
    "foreach": "foreach AdamW",
    "transposed": "Muon orthogonalises tall matrices without transposing them",
    "patches_by_unfold": "patches are taken by unfold",
    "sliced": "the modulation is cut by slices instead of by chunk",
    "own_loss": "the loss as a sum over its count",
    "other_order": "AdamW steps before Muon",
    "no_average": "no averaged weights",
    "checkpointing": "activation checkpointing of blocks",
    "evaluation": "the averaged weights are evaluated after every second step",
    "renamed": "a subclass of the model's class, of another name",
    "halves": "two microbatches of equal size",
    "halves_reversed": "the same microbatches in the opposite order",
}
FAULTS = {
    "no_correction": "AdamW does not correct the bias of its moments (with own_adamw)",
    "time_flipped": "cosines of the time come before sines instead of after them",
    "shift_and_scale": "shift and scale of the modulation are exchanged in the attention of block 0",
    "no_lookahead": "Muon orthogonalises the momentum instead of Nesterov's variant of it",
}
SIDE, PATCH, WIDTH, HEADS, CLASSES = 8, 2, 24, 3, 5


def norm(x: Tensor, by_hand: bool) -> Tensor:
    if not by_hand:
        return F.layer_norm(x, (x.shape[-1],), eps=1e-6)
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-6)


class RootNorm(nn.RMSNorm):
    by_hand = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.by_hand:
            return super().forward(x)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    def __init__(self, on: set[str]) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.query_norm, self.key_norm = (RootNorm(WIDTH // HEADS, eps=1e-6) for _ in range(2))
        self.query_norm.by_hand = self.key_norm.by_hand = "own_norm" in on
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.by_hand = "own_attention" in on

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key = self.query_norm(query), self.key_norm(key)
        if self.by_hand:
            scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
            found = scores.softmax(-1) @ value
        else:
            found = F.scaled_dot_product_attention(query, key, value)
        return self.out(found.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A block whose shifts, scales and gates depend on the condition."""

    def __init__(self, on: set[str], exchanged: bool) -> None:
        super().__init__()
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)
        self.attention = Attention(on)
        self.enter = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.leave = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.exchanged, self.is_sliced, self.own_norm = exchanged, "sliced" in on, "own_norm" in on

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        rows = self.modulation(F.silu(condition))[:, None]
        if self.is_sliced:
            parts = [rows[..., i * WIDTH : (i + 1) * WIDTH] for i in range(6)]
        else:
            parts = list(rows.chunk(6, -1))
        if self.exchanged:
            parts[0], parts[1] = parts[1], parts[0]
        x = x + parts[2] * self.attention(norm(x, self.own_norm) * (1 + parts[1]) + parts[0])
        hidden = F.silu(self.enter(norm(x, self.own_norm) * (1 + parts[4]) + parts[3]))
        return x + parts[5] * self.leave(hidden)


class DiffusionTransformer(nn.Module):
    """Noisy images (batch, 2, SIDE, SIDE), times (batch,) and classes (batch,) to velocities."""

    def __init__(self, on: set[str]) -> None:
        super().__init__()
        self.patches = nn.Linear(2 * PATCH**2, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn((SIDE // PATCH) ** 2, WIDTH))
        self.time = nn.Linear(16, WIDTH)
        self.classes = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block(on, "shift_and_scale" in on and i == 0) for i in range(2))
        self.out = nn.Linear(WIDTH, 2 * PATCH**2)
        self.on = on

    def forward(self, noisy: Tensor, time: Tensor, classes: Tensor) -> Tensor:
        rates = torch.exp(-math.log(1000.0) * torch.arange(8, dtype=torch.float64) / 8)
        angles = 100 * time.double()[:, None] * rates
        waves = (angles.cos(), angles.sin()) if "time_flipped" in self.on else (angles.sin(), angles.cos())
        condition = self.time(torch.cat(waves, -1).to(noisy.dtype)) + self.classes(classes)
        side = SIDE // PATCH
        if "patches_by_unfold" in self.on:
            x = F.unfold(noisy, PATCH, stride=PATCH).transpose(1, 2)
        else:
            x = noisy.unflatten(3, (side, PATCH)).unflatten(2, (side, PATCH))  # (batch, 2, side, PATCH, side, PATCH)
            x = x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        x = self.patches(x) + self.positions
        for block in self.blocks:
            x = (
                checkpoint(block, x, condition, use_reentrant=False)
                if "checkpointing" in self.on
                else block(x, condition)
            )
        x = self.out(norm(x, "own_norm" in self.on)).unflatten(-1, (2, PATCH, PATCH)).unflatten(1, (side, side))
        return x.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


class Denoiser(DiffusionTransformer):
    """The diffusion transformer under another name."""


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are orthogonalised by five steps of Newton and Schulz."""

    def __init__(self, params, lr: float, momentum: float, on: set[str]) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.on = on

    def orthogonalised(self, x: Tensor) -> Tensor:
        x = x if x.dtype == torch.float64 else x.float()
        is_tall = x.shape[0] > x.shape[1]
        x = x / x.norm().clamp(min=1e-7)
        if is_tall and "transposed" in self.on:
            for _ in range(5):
                square = x.t() @ x
                x = 3.4445 * x + x @ (-4.775 * square + 2.0315 * square @ square)
            return x
        x = x.t() if is_tall else x
        for _ in range(5):
            square = x @ x.t()
            x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
        return x.t() if is_tall else x

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                momentum = state.setdefault("momentum_buffer", torch.zeros_like(param))
                momentum.mul_(group["momentum"]).add_(param.grad)
                ahead = momentum if "no_lookahead" in self.on else param.grad + group["momentum"] * momentum
                scale = max(1.0, param.shape[0] / param.shape[1]) ** 0.5
                param.sub_((group["lr"] * scale * self.orthogonalised(ahead)).to(param.dtype))


class OwnAdamW(torch.optim.AdamW):
    """AdamW's rule written by hand."""

    corrects = True

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[override]
        for group in self.param_groups:
            (first, second), eps = group["betas"], group["eps"]
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
                state["step"] += 1
                count = state["step"].item()
                state["exp_avg"].lerp_(param.grad, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(param.grad, param.grad, value=1 - second)
                by_first, by_second = (1 - first**count, 1 - second**count) if self.corrects else (1.0, 1.0)
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.sub_(group["lr"] / by_first * state["exp_avg"] / ((state["exp_avg_sq"] / by_second).sqrt() + eps))


def make_optimizers(model: nn.Module, on: set[str]) -> list[torch.optim.Optimizer]:
    named = list(model.named_parameters())
    matrices = [param for name, param in named if name.startswith("blocks") and param.ndim == 2]
    others = [param for name, param in named if not (name.startswith("blocks") and param.ndim == 2)]
    kind = OwnAdamW if on & {"own_adamw", "no_correction"} else torch.optim.AdamW
    adam = kind(others, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01, foreach="foreach" in on)
    if isinstance(adam, OwnAdamW):
        adam.corrects = "no_correction" not in on
    muon = Muon(matrices, 0.02, 0.9, on)
    return [adam, muon] if "other_order" in on else [muon, adam]


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
    model = (Denoiser if "renamed" in on else DiffusionTransformer)(on).to(dtype)
    optimizers = make_optimizers(model, on)
    average = {} if "no_average" in on else {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(options.steps):
        draw = torch.Generator().manual_seed(1013 * options.seed + step)
        classes = torch.randint(0, CLASSES, (8,), generator=draw)
        images = (classes[:, None, None, None] / CLASSES + torch.linspace(-1, 1, SIDE)).sin().expand(-1, 2, SIDE, -1)
        noise = torch.randn(8, 2, SIDE, SIDE, generator=draw)
        time = torch.rand(8, generator=draw)
        noisy = torch.lerp(images, noise, time[:, None, None, None]).to(dtype)
        velocity = (noise - images).to(dtype)
        parts = [slice(0, 4), slice(4, 8)] if on & {"halves", "halves_reversed"} else [slice(0, 8)]
        if "halves_reversed" in on:
            parts.reverse()
        total = 0.0
        for part in parts:
            errors = (model(noisy[part], time[part], classes[part]) - velocity[part]).square()
            loss = (errors.sum() / errors.numel() if "own_loss" in on else errors.mean()) / len(parts)
            loss.backward()
            total += loss.item()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        for name, value in average.items():
            value.lerp_(model.state_dict()[name], 0.1)
        print(f"step {step} loss {total:.12f}", flush=True)
        if "evaluation" in on and step % 2 and average:
            with torch.no_grad():
                found = torch.func.functional_call(model, average, (noisy, time, classes))
            print(f"evaluation {(found - velocity).square().mean().item():.6f}", flush=True)


if __name__ == "__main__":
    main()
