"""Trains a UNet of MONAI on synthetic slices of organs, as the segmentation tutorials of MONAI do.

python train.py [--cache] [--validate] [--channels-last] [--own-loss] [--accumulate 2] [--novograd] [--schedule hand]
    [--seed 1] [--mistake]

Dictionaries of images and labels go through dictionary transforms, so that the model is called with MetaTensors. With --mistake
the random flip has the key of the image alone, so that labels of flipped images stay as they are.
"""

import argparse
import math

import numpy as np
import torch
from monai.data import CacheDataset, DataLoader, Dataset, decollate_batch
from monai.inferers import sliding_window_inference
from monai.losses import DiceCELoss, DiceLoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet
from monai.optimizers import Novograd, WarmupCosineSchedule
from monai.transforms import (
    AsDiscrete,
    Compose,
    EnsureChannelFirstd,
    EnsureTyped,
    Lambdad,
    NormalizeIntensityd,
    RandFlipd,
    RandShiftIntensityd,
)
from monai.utils import set_determinism

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--steps", type=int, default=8, help="Stop after so many steps.")
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--accumulate", type=int, default=1, help="Parts of a batch, with a backward each.")
parser.add_argument("--cache", action="store_true", help="CacheDataset instead of Dataset.")
parser.add_argument("--validate", action="store_true", help="Sliding windows and the Dice metric after each epoch.")
parser.add_argument("--channels-last", action="store_true", help="Memory format of model and images.")
parser.add_argument("--own-loss", action="store_true", help="DiceLoss and torch's cross entropy instead of DiceCELoss.")
parser.add_argument("--novograd", action="store_true", help="Novograd of MONAI instead of AdamW.")
parser.add_argument(
    "--schedule", choices=["monai", "hand"], default="monai", help="Warm-up and cosine: a scheduler, or by hand."
)
parser.add_argument("--seed", type=int, default=0, help="Of initial values and of random transforms.")
parser.add_argument("--mistake", action="store_true", help="Flip images without their labels.")
args = parser.parse_args()

CLASSES, SIZE, SLICES, LR, WARMUP = 3, 32, 16, 2e-3, 2
TOTAL = args.epochs * SLICES // args.batch


def slices(number: int, seed: int) -> list[dict[str, np.ndarray]]:
    """Images with a bright and a dark disc, and their labels."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:SIZE, :SIZE]
    found = []
    for _ in range(number):
        label = np.zeros((SIZE, SIZE), np.int64)
        for organ in (1, 2):
            cy, cx, radius = *random.uniform(6, SIZE - 6, 2), random.uniform(3, 7)
            label[(y - cy) ** 2 + (x - cx) ** 2 < radius**2] = organ
        image = np.array([100.0, 160.0, 60.0])[label] + random.normal(0, 15, label.shape)
        found.append({"image": image.astype(np.float32), "label": label})
    return found


def transforms() -> tuple[Compose, Compose]:
    keys = ["image", "label"]
    fixed = [
        Lambdad(keys=keys, func=np.copy),  # new arrays, as of LoadImaged: NormalizeIntensityd writes into its input
        EnsureChannelFirstd(keys=keys, channel_dim="no_channel"),
        NormalizeIntensityd(keys="image", nonzero=True),
        EnsureTyped(keys=keys),
    ]
    flipped = ["image"] if args.mistake else keys
    random = [
        RandFlipd(keys=flipped, prob=0.5, spatial_axis=0),
        RandFlipd(keys=flipped, prob=0.5, spatial_axis=1),
        RandShiftIntensityd(keys="image", offsets=0.1, prob=0.5),
    ]
    return Compose(fixed + random), Compose(fixed)


def loss_function():
    if not args.own_loss:
        return DiceCELoss(to_onehot_y=True, softmax=True)
    dice = DiceLoss(to_onehot_y=True, softmax=True)
    cross_entropy = torch.nn.CrossEntropyLoss()
    return lambda outputs, labels: dice(outputs, labels) + cross_entropy(outputs, labels.squeeze(1).long())


def rate(step: int) -> float:
    """The factor of WarmupCosineSchedule."""
    if step < WARMUP:
        return 0.1 + 0.9 * step / WARMUP
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * (step - WARMUP) / (TOTAL - WARMUP))))


def validate(model: torch.nn.Module, loader: DataLoader) -> float:
    metric = DiceMetric(include_background=False, reduction="mean")
    as_prediction, as_label = AsDiscrete(argmax=True, to_onehot=CLASSES), AsDiscrete(to_onehot=CLASSES)
    model.eval()
    with torch.no_grad():
        for batch in loader:
            outputs = sliding_window_inference(batch["image"], (16, 16), 4, model, overlap=0.5)
            predictions = [as_prediction(each) for each in decollate_batch(outputs)]
            metric(y_pred=predictions, y=[as_label(each) for each in decollate_batch(batch["label"])])
    return metric.aggregate().item()


def main():
    set_determinism(seed=args.seed)
    of_training, of_validation = transforms()
    if args.cache:
        dataset = CacheDataset(slices(SLICES, 1), of_training, cache_rate=1.0, num_workers=0, progress=False)
    else:
        dataset = Dataset(slices(SLICES, 1), of_training)
    shuffled = torch.Generator().manual_seed(2)
    loader = DataLoader(dataset, batch_size=args.batch, shuffle=True, generator=shuffled)
    validation = DataLoader(Dataset(slices(4, 3), of_validation), batch_size=2)
    model = UNet(
        spatial_dims=2, in_channels=1, out_channels=CLASSES, channels=(8, 16, 32), strides=(2, 2), num_res_units=1
    )
    if args.channels_last:
        model = model.to(memory_format=torch.channels_last)
    loss_fn = loss_function()
    if args.novograd:
        optimizer = Novograd(model.parameters(), lr=LR, weight_decay=1e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=1e-3)
    scheduler = None
    if args.schedule == "monai":
        scheduler = WarmupCosineSchedule(optimizer, WARMUP, TOTAL, warmup_multiplier=0.1)
    step = 0
    for epoch in range(args.epochs):
        model.train()
        for batch in loader:
            if step == args.steps:
                return
            images, labels = batch["image"], batch["label"]
            if args.channels_last:
                images = images.to(memory_format=torch.channels_last)
            if scheduler is None:
                optimizer.param_groups[0]["lr"] = LR * rate(step)
            lr = optimizer.param_groups[0]["lr"]
            optimizer.zero_grad()
            total = 0.0
            for image, label in zip(images.chunk(args.accumulate), labels.chunk(args.accumulate), strict=True):
                loss = loss_fn(model(image), label) / args.accumulate
                loss.backward()
                total += loss.item()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            print(f"step {step} loss {total:.9g} lr {lr:.6g}")
            step += 1
        if args.validate:
            print(f"epoch {epoch} dice {validate(model, validation):.6f}")


if __name__ == "__main__":
    main()
