"""Classifies random images with fastai's Learner: one cycle, or a flat learning rate with accumulated gradients.

python train.py [--flat] [--norm group] [--batch 8] [--accumulate 8] [--torch-optimizer] [--wd 0] [--mistake]
"""

import argparse
from functools import partial

import torch
from fastai.basics import CrossEntropyLossFlat, DataLoader, DataLoaders, Learner, OptimWrapper, accuracy, set_seed
from fastai.callback.all import GradientAccumulation, GradientClip
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=0, help="Samples of a step; 0: those of a batch.")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--flat", action="store_true", help="Keep the learning rate: fit instead of fit_one_cycle.")
parser.add_argument("--norm", choices=["batch", "group"], default="batch")
parser.add_argument("--torch-optimizer", action="store_true", help="AdamW of torch by OptimWrapper.")
parser.add_argument("--wd", type=float, default=0.1)
parser.add_argument("--mistake", action="store_true", help="Decay biases and the weights of norms as well.")
args = parser.parse_args()


def norm(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if args.norm == "batch" else nn.GroupNorm(4, channels)


def block(channels_in: int, channels_out: int) -> nn.Sequential:
    conv = nn.Conv2d(channels_in, channels_out, 3, stride=2, padding=1, bias=False)
    return nn.Sequential(conv, norm(channels_out), nn.ReLU(inplace=True))


def model() -> nn.Sequential:
    return nn.Sequential(block(3, 8), block(8, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 6))


def images(size: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 3, 12, 12, generator=generator)
    y = torch.randint(6, (size,), generator=generator)
    return list(zip(x, y, strict=True))


def main() -> None:
    set_seed(0, reproducible=True)
    dls = DataLoaders(
        DataLoader(images(24, seed=1), bs=args.batch, num_workers=0),
        DataLoader(images(16, seed=2), bs=args.batch, num_workers=0),
        device="cpu",
    )
    optimizer = {}
    if args.torch_optimizer:
        optimizer = {"opt_func": partial(OptimWrapper, opt=torch.optim.AdamW, betas=(0.9, 0.99), eps=1e-5)}
    learn = Learner(
        dls,
        model(),
        loss_func=CrossEntropyLossFlat(),
        metrics=accuracy,
        lr=5e-3,
        wd=args.wd,
        wd_bn_bias=args.mistake,
        cbs=[GradientClip(1.0), *([GradientAccumulation(args.accumulate)] if args.accumulate else [])],
        **optimizer,
    )
    with learn.no_bar():
        if args.flat:
            learn.fit(args.epochs)
        else:
            learn.fit_one_cycle(args.epochs, 1e-2)
    loss, correct = learn.validate()
    print(f"loss {loss:.5f} accuracy {correct:.3f}")


if __name__ == "__main__":
    main()
