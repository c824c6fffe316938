"""Fine-tunes a Unet of segmentation_models_pytorch on synthetic masks: DDP, an encoder that is frozen at first, ZeRO.

torchrun --nproc-per-node 2 train.py [--optimizer adamw] [--views] [--batch 2 --accumulate 2] [--unfreeze unused] [--mistake]

The encoder is frozen in the first three steps, and then trained at a tenth of the learning rate; its batch norms stay in
evaluation mode. DDP reduces the gradients of parameters that required them when it wrapped the model, so that the script wraps
the model again. With --mistake it does not: gradients of the encoder stay those of each rank. ZeroRedundancyOptimizer broadcasts
the parameters that a rank updates, so that ranks agree all the same.
"""

# ruff: noqa: E402

import argparse
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

for operator in (
    "nms",
    "qnms",
):  # of torchvision, whose released wheels have them for CUDA alone; nothing here calls them
    torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import segmentation_models_pytorch as smp

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--batch", type=int, default=4, help="Images of a rank and microbatch.")
parser.add_argument("--accumulate", type=int, default=1, help="Microbatches of a step.")
parser.add_argument("--optimizer", choices=["zero", "adamw"], default="zero", help="ZeroRedundancyOptimizer or AdamW.")
parser.add_argument("--views", action="store_true", help="Gradients and parameters are views of buckets.")
parser.add_argument(
    "--unfreeze",
    choices=["wrap", "unused"],
    default="wrap",
    help="Wrap the model again, or wrap it once with find_unused_parameters and detach what the encoder returns.",
)
parser.add_argument("--mistake", action="store_true", help="Unfreeze the encoder without wrapping the model again.")
args = parser.parse_args()

SIZE, IMAGES, FROZEN, LR = 32, 32, 3, 3e-3


class Blobs(Dataset):
    """Noisy images of two discs, and the mask of the brighter one."""

    def __init__(self):
        random = np.random.default_rng(0)
        y, x = np.mgrid[:SIZE, :SIZE]
        centers, radii = random.uniform(6, SIZE - 6, (IMAGES, 2, 2)), random.uniform(3, 8, (IMAGES, 2))
        discs = (y - centers[..., 0, None, None]) ** 2 + (x - centers[..., 1, None, None]) ** 2 < radii[
            ..., None, None
        ] ** 2
        gray = 1.0 * discs[:, 0] - 0.7 * discs[:, 1]
        images = gray[:, None] + 0.3 * random.standard_normal((IMAGES, 3, SIZE, SIZE))
        self.images = torch.as_tensor(images, dtype=torch.float32)
        self.masks = torch.as_tensor(discs[:, :1], dtype=torch.float32)

    def __len__(self):
        return IMAGES

    def __getitem__(self, index):
        return self.images[index], self.masks[index]


class Segmenter(torch.nn.Module):
    """A Unet whose encoder can be detached."""

    def __init__(self):
        super().__init__()
        self.net = smp.Unet(
            "tu-test_resnet",
            encoder_weights=None,
            encoder_depth=3,
            decoder_channels=(16, 12, 8),
            decoder_use_norm={"type": "instancenorm", "affine": True},
            classes=1,
        )
        self.detached = False

    def train(self, mode=True):
        super().train(mode)
        self.net.encoder.eval()
        return self

    def forward(self, images):
        features = self.net.encoder(images)
        if self.detached:
            features = [each.detach() for each in features]
        return self.net.segmentation_head(self.net.decoder(features))


def make_optimizer(parameters):
    if args.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=LR, weight_decay=0.01)
    return ZeroRedundancyOptimizer(
        parameters, torch.optim.AdamW, parameters_as_bucket_view=args.views, lr=LR, weight_decay=0.01
    )


def main():
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Segmenter()
    encoder = list(model.net.encoder.parameters())
    others = [*model.net.decoder.parameters(), *model.net.segmentation_head.parameters()]
    once = args.unfreeze == "unused"
    for parameter in encoder:
        parameter.requires_grad_(once)
    model.detached = once

    def wrap():
        return DistributedDataParallel(model, find_unused_parameters=once, gradient_as_bucket_view=args.views)

    wrapped = wrap()
    wrapped.train()
    optimizer = make_optimizer(others)
    losses = smp.losses.SoftBCEWithLogitsLoss(smooth_factor=0.1), smp.losses.FocalLoss("binary")
    data = Blobs()
    sampler = DistributedSampler(data, ranks, rank, shuffle=True, seed=1)
    loader = DataLoader(data, args.batch, sampler=sampler)
    batches = []
    for epoch in range(-(-args.steps * args.batch * args.accumulate * ranks // IMAGES)):
        sampler.set_epoch(epoch)
        batches += loader
    for step in range(args.steps):
        if step == FROZEN:
            for parameter in encoder:
                parameter.requires_grad_(True)
            model.detached = False
            optimizer.add_param_group({"params": encoder, "lr": 0.1 * LR})
            if not once and not args.mistake:
                wrapped = wrap()
        optimizer.zero_grad()
        total = 0.0
        for micro in range(args.accumulate):
            images, masks = batches[step * args.accumulate + micro]
            last = micro == args.accumulate - 1
            with nullcontext() if last else wrapped.no_sync():
                logits = wrapped(images)
                loss = sum(loss_fn(logits, masks) for loss_fn in losses) / args.accumulate
                loss.backward()
            total += loss.item()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {total:.9g}")
    dist.barrier()  # lets threads of gloo release their last work: the process can hang otherwise
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
