"""Train a small residual net with batch norm, written by hand: SGD of Nesterov, warm-up, dropout, smoothed labels."""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLEAN = {
    "base": "torch's batch norm and convolutions",
    "own_norm": "batch norm by hand",
    "channels_last": "images and convolutions in channels-last memory",
    "unfolded": "the stem's convolution as a product of matrices",
    "own_loss": "smoothed labels by hand from log_softmax",
    "own_dropout": "dropout as a product with a mask",
    "own_sgd": "the rule of SGD written out",
    "foreach": "foreach SGD",
    "relu_in_place": "ReLU in place",
    "other_sum": "the shortcut plus the branch instead of the branch plus the shortcut",
    "evaluation": "evaluation after every second step",
    "renamed": "a subclass of the model's class, of another name",
    "one_group_each": "a group for each parameter",
    "rate_by_hand": "the schedule is written into the groups instead of by SequentialLR",
}
FAULTS = {
    "stays_in_eval": "after an evaluation the model stays in eval mode (with evaluation)",
    "norm_epsilon": "the first norm of block 1 has epsilon 1e-3 instead of 1e-5",
    "head_transposed": "the head's weight is loaded transposed",
    "zeroed_early": "at step 2 gradients are set to zero before the optimizer steps",
    "dropout_share": "dropout keeps what it should drop: its probability is 0.8 instead of 0.2",
}
CLASSES, RATE = 16, 0.05


class Norm(nn.BatchNorm2d):
    """Batch norm by torch or by hand."""

    by_hand = False

    def forward(self, input: Tensor) -> Tensor:
        if not (self.by_hand and self.training):
            return super().forward(input)
        mean = input.mean((0, 2, 3))
        centred = input - mean[:, None, None]
        variance = centred.square().mean((0, 2, 3))
        with torch.no_grad():
            count = input.numel() / input.shape[1]
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        return centred * scale[:, None, None] + self.bias[:, None, None]


class Unfolded(nn.Conv2d):
    """The same function as a product of matrices."""

    def forward(self, input: Tensor) -> Tensor:
        rows = F.unfold(input, self.kernel_size, padding=self.padding)
        return (self.weight.flatten(1) @ rows).unflatten(-1, input.shape[-2:])


class OwnDropout(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:
        return input * F.dropout(torch.ones_like(input), self.p) if self.training else input


class Block(nn.Module):
    def __init__(self, enter: int, leave: int, stride: int, on: set[str]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(enter, leave, 3, stride, 1, bias=False)
        self.norm1 = Norm(leave)
        self.conv2 = nn.Conv2d(leave, leave, 3, 1, 1, bias=False)
        self.norm2 = Norm(leave)
        self.short = nn.Sequential(nn.Conv2d(enter, leave, 1, stride, bias=False), Norm(leave))
        if enter == leave and stride == 1:
            self.short = nn.Identity()
        self.relu = nn.ReLU(inplace="relu_in_place" in on)
        self.is_other_sum = "other_sum" in on

    def forward(self, x: Tensor) -> Tensor:
        branch = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        short = self.short(x)
        return self.relu(short + branch if self.is_other_sum else branch + short)


class ResNet(nn.Module):
    """Images (batch, 3, 12, 12) to logits (batch, CLASSES)."""

    def __init__(self, on: set[str]) -> None:
        super().__init__()
        self.stem = (Unfolded if "unfolded" in on else nn.Conv2d)(3, 8, 3, 1, 1, bias=False)
        self.norm = Norm(8)
        self.blocks = nn.Sequential(Block(8, 8, 1, on), Block(8, 16, 2, on), Block(16, 16, 1, on))
        self.drop = (OwnDropout if "own_dropout" in on else nn.Dropout)(0.8 if "dropout_share" in on else 0.2)
        self.head = nn.Linear(16, CLASSES)
        for module in self.modules():
            if isinstance(module, Norm):
                module.by_hand = "own_norm" in on

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.head(self.drop(F.adaptive_avg_pool2d(x, 1).flatten(1)))


class Classifier(ResNet):
    """The residual net under another name."""


class OwnSGD(torch.optim.SGD):
    """SGD's rule with momentum and Nesterov's variant, written by hand."""

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                grad = param.grad + group["weight_decay"] * param
                state = self.state[param]
                if "momentum_buffer" in state:
                    state["momentum_buffer"].mul_(group["momentum"]).add_(grad)
                else:
                    state["momentum_buffer"] = grad.clone()
                param.sub_(group["lr"] * (grad + group["momentum"] * state["momentum_buffer"]))


def make_model(seed: int, dtype: torch.dtype, on: set[str]) -> ResNet:
    torch.manual_seed(seed)
    model = (Classifier if "renamed" in on else ResNet)(on).to(dtype)
    if "channels_last" in on:
        model = model.to(memory_format=torch.channels_last)
    if "norm_epsilon" in on:
        model.blocks[1].norm1.eps = 1e-3
    if "head_transposed" in on:
        model.head.weight.data = model.head.weight.data.t().contiguous()
    return model


def make_optimizer(model: nn.Module, on: set[str]) -> torch.optim.Optimizer:
    params = list(model.parameters())
    groups = [{"params": [param]} for param in params] if "one_group_each" in on else params
    kind = OwnSGD if "own_sgd" in on else torch.optim.SGD
    return kind(groups, lr=RATE, momentum=0.9, nesterov=True, weight_decay=1e-3, foreach="foreach" in on)


def batch_of(step: int, seed: int, dtype: torch.dtype, on: set[str]) -> tuple[Tensor, Tensor]:
    """16 images with a bright row and column that their class states, half of them negated, and their classes."""
    draw = torch.Generator().manual_seed(7001 * seed + step)
    images = torch.randn(16, 3, 12, 12, generator=draw)
    classes = torch.randint(0, CLASSES, (16,), generator=draw)
    for image, label in zip(images, classes.tolist(), strict=True):
        image[0, label // 4 * 3] += 2
        image[1, :, label % 4 * 3] += 2
    images[torch.rand(16, generator=draw) < 0.5] *= -1
    images = images.to(dtype)
    return images.to(memory_format=torch.channels_last) if "channels_last" in on else images, classes


def loss_of(logits: Tensor, classes: Tensor, on: set[str]) -> Tensor:
    if "own_loss" in on:
        logs = logits.log_softmax(-1)
        return -(0.9 * logs.gather(-1, classes[:, None])[:, 0] + 0.1 * logs.mean(-1)).mean()
    return F.cross_entropy(logits, classes, label_smoothing=0.1)


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
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, 1.0, total_iters=2)
    fall = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, fall], [2])
    for step in range(options.steps):
        if "rate_by_hand" in on:
            for group in optimizer.param_groups:
                group["lr"] = RATE * (0.25 + 0.375 * step if step < 2 else 0.9 ** (step - 2))
        torch.manual_seed(31 * options.seed + step)  # of dropout
        images, classes = batch_of(step, options.seed, dtype, on)
        loss = loss_of(model(images), classes, on)
        loss.backward()
        if "zeroed_early" in on and step == 2:
            optimizer.zero_grad()
        optimizer.step()
        if "rate_by_hand" not in on:
            schedule.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.12f}", flush=True)
        if "evaluation" in on and step % 2:
            model.eval()
            with torch.no_grad():
                print(f"evaluation {(model(images).argmax(-1) == classes).double().mean().item():.6f}")
            if "stays_in_eval" not in on:
                model.train()


if __name__ == "__main__":
    main()
