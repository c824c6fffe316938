"""Trains a small encoder without labels by lightly, in the style of its examples: MoCo, SimCLR and BYOL.

torchrun --nproc-per-node 2 train.py [--method simclr] [--checkpoint] [--own-loss] [--mistake]
python train.py --method byol --batch 8 [--knn] [--workers 1] [--no-grad]

On two ranks the losses gather: MoCo's memory bank has the keys of both ranks. With --mistake gather_distributed keeps its
default, False, so that the bank of each rank has its own keys alone.
"""

# ruff: noqa: E402

import argparse
import copy
import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

for operator in (
    "nms",
    "qnms",
):  # of torchvision, whose released wheels have them for CUDA alone; nothing here calls them
    torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from lightly.loss import NegativeCosineSimilarity, NTXentLoss
from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead, MoCoProjectionHead, SimCLRProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.transforms import SimCLRTransform
from lightly.utils.scheduler import cosine_schedule
from PIL import Image

parser = argparse.ArgumentParser()
parser.add_argument("--method", choices=["moco", "simclr", "byol"], default="moco")
parser.add_argument("--batch", type=int, default=4, help="Images of a rank.")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--checkpoint", action="store_true", help="Compute the backbone again in backward.")
parser.add_argument("--own-loss", action="store_true", help="Losses of MoCo and BYOL, written out.")
parser.add_argument("--no-grad", action="store_true", help="Momentum encoders under no_grad instead of detach().")
parser.add_argument("--knn", action="store_true", help="Classify by nearest neighbours after each epoch.")
parser.add_argument("--workers", type=int, default=0, help="Processes of the data loader.")
parser.add_argument("--mistake", action="store_true", help="Leave gather_distributed at its default.")
args = parser.parse_args()

IMAGES, CLASSES, SIZE, WIDTH, BANK, TEMPERATURE = 32, 4, 16, 16, 32, 0.1
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


class Views(Dataset):
    """Two random views of each image; they are the same whichever process makes them."""

    def __init__(self, number: int, seed: int):
        generator = np.random.default_rng(seed)
        self.labels = generator.integers(CLASSES, size=number)
        templates = np.random.default_rng(100).uniform(0, 255, (CLASSES, SIZE, SIZE, 3))
        pixels = templates[self.labels] + 30 * generator.standard_normal((number, SIZE, SIZE, 3))
        self.images = [Image.fromarray(each) for each in pixels.clip(0, 255).astype(np.uint8)]
        self.transform = SimCLRTransform(input_size=SIZE, min_scale=0.5, gaussian_blur=0.0)
        self.epoch = 0

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        seed = 1000 * self.epoch + index
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            return self.transform(self.images[index]), index

    def plain(self):
        pixels = np.stack([np.asarray(each) for each in self.images])
        return torch.as_tensor(pixels / 127.5 - 1, dtype=torch.float32).permute(0, 3, 1, 2), torch.as_tensor(
            self.labels
        )


def backbone() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, WIDTH, 3, stride=2, padding=1, bias=False),
        nn.GroupNorm(4, WIDTH),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
    )


class Encoder(nn.Module):
    """A backbone and a projection, for MoCo and BYOL with their momentum copies."""

    def __init__(self):
        super().__init__()
        self.backbone = backbone()
        if args.method == "moco":
            self.projection_head = MoCoProjectionHead(WIDTH, 32, 16)
        elif args.method == "byol":
            self.projection_head = BYOLProjectionHead(WIDTH, 32, 16)
            self.prediction_head = BYOLPredictionHead(16, 32, 16)
        else:
            self.projection_head = SimCLRProjectionHead(WIDTH, 32, 16, batch_norm=False)
        if args.method != "simclr":
            self.backbone_momentum = copy.deepcopy(self.backbone)
            self.projection_head_momentum = copy.deepcopy(self.projection_head)
            deactivate_requires_grad(self.backbone_momentum)
            deactivate_requires_grad(self.projection_head_momentum)

    def forward(self, x):
        if args.checkpoint:
            y = checkpoint(self.backbone, x, use_reentrant=False)
        else:
            y = self.backbone(x)
        z = self.projection_head(y.flatten(start_dim=1))
        return self.prediction_head(z) if args.method == "byol" else z

    def forward_momentum(self, x):
        with torch.set_grad_enabled(not args.no_grad):
            y = self.backbone_momentum(x).flatten(start_dim=1)
            z = self.projection_head_momentum(y)
        return z if args.no_grad else z.detach()


class OwnMoCoLoss(nn.Module):
    """NTXentLoss with a memory bank and gather_distributed."""

    def __init__(self):
        super().__init__()
        self.bank, self.next = functional.normalize(torch.randn(BANK, 16), dim=-1), 0

    def forward(self, query, key):
        query, key = functional.normalize(query, dim=1), functional.normalize(key, dim=1)
        negatives = self.bank.clone()
        keys = [torch.empty_like(key) for _ in range(RANKS)]
        if RANKS > 1:
            dist.all_gather(keys, key)
        else:
            keys = [key]
        keys = torch.cat(keys)
        self.bank[self.next : self.next + len(keys)] = keys
        self.next = (self.next + len(keys)) % BANK
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ negatives.T], dim=1) / TEMPERATURE
        return (logits.logsumexp(1) - logits[:, 0]).mean()


def own_cosine_loss(p, z):
    return -(functional.normalize(p, dim=1) * functional.normalize(z, dim=1)).sum(1).mean()


def make_criterion():
    if args.method == "byol":
        return own_cosine_loss if args.own_loss else NegativeCosineSimilarity()
    if args.method == "moco" and args.own_loss:
        return OwnMoCoLoss()
    bank = (BANK, 16) if args.method == "moco" else 0
    gather = RANKS > 1 and not args.mistake
    return NTXentLoss(temperature=TEMPERATURE, memory_bank_size=bank, gather_distributed=gather)


def loss_of(model, encoder, criterion, x0, x1):
    """The model may be wrapped in DDP; momentum copies are those of the encoder."""
    if args.method == "moco":
        return criterion(model(x0), encoder.forward_momentum(x1))
    if args.method == "simclr":
        return criterion(*model(torch.cat([x0, x1])).chunk(2))
    p0, p1 = model(x0), model(x1)
    z0, z1 = encoder.forward_momentum(x0), encoder.forward_momentum(x1)
    return 0.5 * (criterion(p0, z1) + criterion(p1, z0))


def nearest(encoder, bank, queries) -> float:
    encoder.eval()
    with torch.no_grad():
        known, wanted = (functional.normalize(encoder.backbone(each[0]).flatten(1), dim=1) for each in (bank, queries))
        guesses = bank[1][(wanted @ known.T).argmax(1)]
    encoder.train()
    return (guesses == queries[1]).float().mean().item()


def main():
    if RANKS > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if RANKS > 1 else 0
    torch.manual_seed(0)
    encoder = Encoder()
    model = DistributedDataParallel(encoder) if RANKS > 1 else encoder
    criterion = make_criterion()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.06, momentum=0.9, weight_decay=1e-4)
    data, test = Views(IMAGES, 1), Views(8, 2)
    sampler = DistributedSampler(data, RANKS, rank, shuffle=True, seed=3)
    loader = DataLoader(data, args.batch, sampler=sampler, num_workers=args.workers, drop_last=True)
    step = epoch = 0
    while step < args.steps:
        sampler.set_epoch(epoch)
        data.epoch = epoch
        for (x0, x1), _ in loader:
            if step == args.steps:
                break
            if args.method != "simclr":
                momentum = cosine_schedule(step, args.steps, 0.9, 1.0)
                update_momentum(encoder.backbone, encoder.backbone_momentum, m=momentum)
                update_momentum(encoder.projection_head, encoder.projection_head_momentum, m=momentum)
            loss = loss_of(model, encoder, criterion, x0, x1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                print(f"step {step} loss {loss.item():.9g}")
            step += 1
        if args.knn:
            print(f"epoch {epoch} nearest neighbours {nearest(encoder, data.plain(), test.plain()):.4f}")
        epoch += 1
    if RANKS > 1:
        dist.barrier()  # lets threads of gloo release their last work: the process can hang otherwise
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
