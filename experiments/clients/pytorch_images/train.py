"""Trains a residual net on random images with DistributedDataParallel, in the style of the image scripts of pytorch/examples.

torchrun --nproc-per-node 2 train.py [--parallel crossframe] [--norm group] [--batch 4] [--evaluate] [--mistake]
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--parallel", choices=["ddp", "torch", "crossframe", "none"], default="ddp")
parser.add_argument("--norm", choices=["batch", "group"], default="batch")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch", type=int, default=4, help="Images of a rank.")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--evaluate", action="store_true", help="Measure the accuracy after each epoch.")
parser.add_argument("--mistake", action="store_true", help="Never call set_epoch: each epoch has the same order.")
args = parser.parse_args()

if args.parallel == "crossframe":
    from torch_backend import fully_shard
else:
    from torch.distributed.fsdp import fully_shard


def norm(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if args.norm == "batch" else nn.GroupNorm(4, channels)


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.norm1 = norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = norm(channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride, bias=False), norm(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Images of 3 x 16 x 16 to 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), norm(8), nn.ReLU(inplace=True))
        self.layers = nn.Sequential(Block(8, 8, 1), Block(8, 16, 2), Block(16, 16, 1))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.pool(self.layers(self.stem(x))).flatten(1))


def images(number: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(number, 3, 16, 16, generator=generator), torch.randint(0, 10, (number,), generator=generator)
    )


def train(loader: DataLoader, model: nn.Module, criterion: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.train()
    for pictures, labels in loader:
        loss = criterion(model(pictures), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def evaluate(loader: DataLoader, model: nn.Module) -> float:
    model.eval()
    right = torch.zeros(2)
    for pictures, labels in loader:
        right += torch.stack([(model(pictures).argmax(1) == labels).sum(), torch.tensor(len(labels))])
    dist.all_reduce(right)
    return float(right[0] / right[1])


def main() -> None:
    dist.init_process_group("gloo")
    ranks = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model: nn.Module = ResNet()
    if args.parallel == "ddp":
        model = DistributedDataParallel(model)
    elif args.parallel != "none":
        for block in model.layers:
            fully_shard(block)
        fully_shard(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.1)
    data = images(32, seed=1)
    sampler = DistributedSampler(data, num_replicas=ranks, rank=dist.get_rank())
    loader = DataLoader(data, args.batch, sampler=sampler, num_workers=args.workers)
    held_out = images(16, seed=2)
    checked = DataLoader(held_out, args.batch, sampler=DistributedSampler(held_out, shuffle=False, drop_last=True))
    for epoch in range(args.epochs):
        if not args.mistake:
            sampler.set_epoch(epoch)
        train(loader, model, criterion, optimizer)
        scheduler.step()
        if args.evaluate:
            accuracy = evaluate(checked, model)
            if dist.get_rank() == 0:
                print(f"epoch {epoch} accuracy {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
