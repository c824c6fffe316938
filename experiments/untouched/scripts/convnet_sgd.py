"""Train a small convolutional net with batch norm by SGD with momentum, whose gradients and weights are edited by hand.

Gradients of convolutions are centred before each step, and filters are cut back to a largest norm after it.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLEAN = {
    "base": "SGD by loops over parameters",
    "foreach": "foreach SGD",
    "fused": "fused SGD",
    "manual_pad": "padding by F.pad before a convolution without any",
    "own_norm": "batch norm from means and squares",
    "own_sgd": "a hand-written optimizer of the same rule",
    "channels_last": "images and weights in the memory format channels_last",
    "data_edit": "weights are edited through .data instead of under no_grad",
    "no_evaluation": "nothing is evaluated between steps",
    "unfold": "the second convolution as a product of patches and weights",
    "clip_value": "gradients are cut at 1000, which none reaches",
    "renamed": "the net's class has another name",
    "nll": "the loss as negative log likelihood of log_softmax",
}
FAULTS = {
    "stays_in_eval": "after the first evaluation the net stays in eval mode",
    "one_sided_padding": "the second convolution pads right and below only",
    "no_nesterov": "momentum without Nesterov's step",
    "not_centred": "gradients of convolutions are not centred from step 2 on",
    "max_norm_before": "filters are cut back before the step instead of after it",
    "decay_on_norms": "batch norm's weights and biases are decayed",
    "norm_momentum_swapped": "running statistics keep a tenth, and are used to normalise (eval mode throughout)",
    "flipped_kernel": "the last convolution uses its kernel upside down",
    "low_precision_pool": "the mean over positions is taken in bfloat16",
}


class Convolution(nn.Conv2d):
    """A convolution whose padding and arithmetic are spelt out where a variant asks for it."""

    how = ""

    def forward(self, input: Tensor) -> Tensor:
        if self.how == "manual_pad":
            return F.conv2d(F.pad(input, (1, 1, 1, 1)), self.weight, None, self.stride)
        if self.how == "one_sided_padding":
            return F.conv2d(F.pad(input, (0, 2, 0, 2)), self.weight, None, self.stride)
        if self.how == "flipped_kernel":
            return F.conv2d(input, self.weight.flip(2), None, self.stride, self.padding)
        if self.how == "unfold":
            patches = F.unfold(input, 3, padding=1, stride=self.stride[0])
            size = (input.shape[2] - 1) // self.stride[0] + 1
            return (self.weight.flatten(1) @ patches).unflatten(2, (size, size))
        return super().forward(input)


class OwnNorm(nn.BatchNorm2d):
    """Batch norm from means and squares."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        mean = input.mean((0, 2, 3))
        centred = input - mean[:, None, None]
        var = centred.square().mean((0, 2, 3))
        with torch.no_grad():
            numel = input.numel() / input.shape[1]
            assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * numel / (numel - 1), self.momentum)
        scale = self.weight * torch.rsqrt(var + self.eps)
        return centred * scale[:, None, None] + self.bias[:, None, None]


class Net(nn.Module):
    """Images (batch, 3, 12, 12) to logits (batch, 10)."""

    def __init__(self, on: set[str]) -> None:
        super().__init__()
        norm = OwnNorm if "own_norm" in on else nn.BatchNorm2d
        self.stem = Convolution(3, 16, 3, padding=1, bias=False)
        self.norm1 = norm(16)
        self.down = Convolution(16, 24, 3, stride=2, padding=1, bias=False)
        self.norm2 = norm(24)
        self.mix = Convolution(24, 24, 3, padding=1, bias=False)
        self.norm3 = norm(24)
        self.head = nn.Linear(24, 10)
        self.pools_in_bfloat16 = "low_precision_pool" in on

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.stem(x)))
        x = F.relu(self.norm2(self.down(x)))
        x = x + F.relu(self.norm3(self.mix(x)))
        if self.pools_in_bfloat16:
            return self.head(x.bfloat16().mean((2, 3)).to(x.dtype))
        return self.head(x.mean((2, 3)))


class ImageNet(Net):
    """The net under another name."""


class Nesterov(torch.optim.Optimizer):
    """SGD with Nesterov's momentum, written by hand."""

    def __init__(self, params, lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                grad = param.grad + group["weight_decay"] * param
                state = self.state[param]
                if not state:
                    state["momentum_buffer"] = grad.clone()
                else:
                    state["momentum_buffer"].mul_(group["momentum"]).add_(grad)
                param.sub_(group["lr"] * (grad + group["momentum"] * state["momentum_buffer"]))


def make_net(seed: int, dtype: torch.dtype, on: set[str]) -> Net:
    torch.manual_seed(seed)
    net = (ImageNet if "renamed" in on else Net)(on).to(dtype)
    for name, how in (
        ("down", "manual_pad"),
        ("down", "one_sided_padding"),
        ("down", "unfold"),
        ("mix", "flipped_kernel"),
    ):
        if how in on:
            getattr(net, name).how = how
    if "norm_momentum_swapped" in on:
        for norm in (net.norm1, net.norm2, net.norm3):
            norm.momentum = 0.9
            norm.eval()
    return net.to(memory_format=torch.channels_last) if "channels_last" in on else net  # type: ignore[call-overload]


def make_optimizer(net: Net, on: set[str]) -> torch.optim.Optimizer:
    norms = [param for name, param in net.named_parameters() if name.startswith("norm")]
    others = [param for name, param in net.named_parameters() if not name.startswith("norm")]
    groups = [
        {"params": others, "weight_decay": 1e-2},
        {"params": norms, "weight_decay": 1e-2 if "decay_on_norms" in on else 0.0},
    ]
    if "own_sgd" in on:
        return Nesterov(groups, lr=0.05, momentum=0.9)
    fused = True if "fused" in on else None
    nesterov = "no_nesterov" not in on
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=nesterov, foreach="foreach" in on, fused=fused)


def cut_back(net: Net, most: float, on: set[str]) -> None:
    """Scale filters down to a largest norm."""
    for conv in (net.stem, net.down, net.mix):
        with torch.no_grad():
            norm = conv.weight.flatten(1).norm(dim=1).clamp(min=most)
            factor = (most / norm)[:, None, None, None]
            if "data_edit" in on:
                conv.weight.data = conv.weight.data * factor
            else:
                conv.weight.mul_(factor)


def batch_of(step: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """12 images and their labels: a label says which of ten stripes is bright."""
    draw = torch.Generator().manual_seed(32452843 + 541 * seed + step)
    images = torch.randn(12, 3, 12, 12, generator=draw, dtype=torch.float64)
    labels = torch.randint(0, 10, (12,), generator=draw)
    images[torch.arange(12), :, labels] += 1.5
    return images.to(dtype), labels


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", default="base", help="names joined by +")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    on = set(options.variant.split("+"))
    assert on <= CLEAN.keys() | FAULTS.keys(), on
    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)
    net = make_net(options.seed, dtype, on)
    optimizer = make_optimizer(net, on)
    for step in range(options.steps):
        images, labels = batch_of(step, options.seed, dtype)
        if "channels_last" in on:
            images = images.contiguous(memory_format=torch.channels_last)
        logits = net(images)
        loss = F.nll_loss(F.log_softmax(logits, -1), labels) if "nll" in on else F.cross_entropy(logits, labels)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        for conv in (net.stem, net.down, net.mix):
            grad = conv.weight.grad
            assert grad is not None
            if not ("not_centred" in on and step >= 2):
                grad -= grad.mean((1, 2, 3), keepdim=True)
        if "clip_value" in on:
            nn.utils.clip_grad_value_(net.parameters(), 1000.0)
        if "max_norm_before" in on:
            cut_back(net, 0.5, on)
        optimizer.step()
        if "max_norm_before" not in on:
            cut_back(net, 0.5, on)
        print(f"step {step} loss {loss.item():.12f}", flush=True)
        if step % 4 == 3 and "no_evaluation" not in on:
            net.eval()
            with torch.no_grad():
                held_out, truth = batch_of(step + 500, options.seed, dtype)
                print(f"evaluation {F.cross_entropy(net(held_out), truth).item():.6f}")
            if "stays_in_eval" not in on:
                net.train()


if __name__ == "__main__":
    main()
