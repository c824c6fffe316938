"""Trains a small detector of Ultralytics on synthetic images by DetectionTrainer, with mosaics, warm-up, accumulation and EMA.

python train.py [--api yolo] [--cache] [--freeze number|list] [--ema-decay 0.9] [--optimizer auto|adamw]
    [--preview] [--mistake]

The script writes images, labels and the configuration of the model into a temporary folder. With --preview a callback looks at
predictions of the model after the third batch of each epoch, in evaluation mode. With --mistake it does not put the model back
into training mode, which the trainer does at the start of an epoch alone: batch norms use and keep their running statistics until
then.
"""

import argparse
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
import yaml
from PIL import Image

for operator in (
    "nms",
    "qnms",
):  # of torchvision, whose released wheels have them for CUDA alone; nothing here calls them
    torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3, help="Each has five batches.")
parser.add_argument("--api", choices=["trainer", "yolo"], default="trainer", help="DetectionTrainer, or YOLO.train.")
parser.add_argument("--cache", action="store_true", help="Keep images in memory.")
parser.add_argument("--freeze", choices=["number", "list"], help="Freeze the first layer.")
parser.add_argument("--ema-decay", type=float, default=0.0, help="Another decay of averaged weights than the default.")
parser.add_argument("--optimizer", choices=["sgd", "auto", "adamw"], default="sgd", help="adamw: what auto stands for.")
parser.add_argument("--no-foreach", action="store_true", help="The optimizer takes one parameter at a time.")
parser.add_argument("--preview", action="store_true", help="Look at predictions in between.")
parser.add_argument("--mistake", action="store_true", help="Leave the model in evaluation mode after the preview.")
args = parser.parse_args()

CLASSES, SIZE, IMAGES, BATCH = 3, 64, 20, 4
MODEL = {
    "nc": CLASSES,
    "backbone": [
        [-1, 1, "Conv", [8, 3, 2]],
        [-1, 1, "Conv", [16, 3, 2]],
        [-1, 1, "C2f", [16, True]],
        [-1, 1, "Conv", [24, 3, 2]],
        [-1, 1, "SPPF", [24, 5]],
    ],
    "head": [
        [-1, 1, "nn.Upsample", [None, 2, "nearest"]],
        [[-1, 2], 1, "Concat", [1]],
        [-1, 1, "C2f", [16]],
        [[7, 4], 1, "Detect", ["nc"]],
    ],
}


def write(folder: Path) -> tuple[str, str]:
    """Writes noisy images of colored rectangles, their labels, and the configurations of the model and the data."""
    random = np.random.default_rng(1)
    for part, number in (("train", IMAGES), ("val", 4)):
        for kind in ("images", "labels"):
            (folder / kind / part).mkdir(parents=True)
        for image in range(number):
            pixels = random.uniform(0, 90, (SIZE, SIZE, 3))
            lines = []
            for _ in range(random.integers(1, 4)):
                width, height = random.integers(10, 28, 2)
                left, top = random.integers(0, SIZE - width), random.integers(0, SIZE - height)
                label = random.integers(CLASSES)
                pixels[top : top + height, left : left + width, label] += 150
                box = (left + width / 2, top + height / 2, width, height)
                lines.append(" ".join([str(label), *(f"{each / SIZE:.6f}" for each in box)]))
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / "images" / part / f"{image:03}.png")
            (folder / "labels" / part / f"{image:03}.txt").write_text("\n".join(lines) + "\n")
    names = {each: f"rectangle {each}" for each in range(CLASSES)}
    (folder / "data.yaml").write_text(
        yaml.safe_dump({"path": str(folder), "train": "images/train", "val": "images/val", "names": names})
    )
    (folder / "model.yaml").write_text(yaml.safe_dump(MODEL))
    return str(folder / "model.yaml"), str(folder / "data.yaml")


def overrides(folder: Path) -> dict:
    model, data = write(folder)
    values = {
        "model": model,
        "data": data,
        "epochs": args.epochs,
        "imgsz": SIZE,
        "batch": BATCH,
        "nbs": 2 * BATCH,
        "workers": 0,
        "device": "cpu",
        "seed": 0,
        "deterministic": True,
        "pretrained": False,
        "amp": False,
        "plots": False,
        "save": False,
        "verbose": False,
        "project": str(folder / "runs"),
        "name": "run",
        "warmup_epochs": 1.0,
        "close_mosaic": 1,
        "mosaic": 1.0,
        "cache": "ram" if args.cache else False,
        "optimizer": "SGD",
        "lr0": 0.01,
        "momentum": 0.9,
    }
    if args.freeze:
        values["freeze"] = 1 if args.freeze == "number" else [0]
    if args.optimizer == "auto":
        values["optimizer"] = "auto"
    if args.optimizer == "adamw":
        rate = round(0.002 * 5 / (4 + CLASSES), 6)
        values |= {"optimizer": "AdamW", "lr0": rate, "momentum": 0.9, "warmup_bias_lr": 0.0}
    return values


def before(trainer):
    """At the start of the training: another average, or another implementation of the optimizer."""
    if args.ema_decay:
        from ultralytics.utils.torch_utils import ModelEMA

        trainer.ema = ModelEMA(trainer.model, decay=args.ema_decay, tau=1)
    if args.no_foreach:
        for group in trainer.optimizer.param_groups:
            group["foreach"] = False


class Batches:
    """Prints losses, and shows what the model predicts for an image."""

    def __init__(self):
        self.number = 0

    def __call__(self, trainer):
        rate = trainer.optimizer.param_groups[0]["lr"]
        print(f"batch {self.number} loss {trainer.loss.item():.9g} lr {rate:.6g}")
        self.number += 1
        if (args.preview or args.mistake) and self.number % 5 == 3:
            trainer.model.eval()
            with torch.no_grad():
                predicted = trainer.model(torch.full((1, 3, SIZE, SIZE), 0.3))
            print(f"preview {predicted[0].mean().item():.6g}")
            if not args.mistake:
                trainer.model.train()


def main():
    folder = Path(tempfile.mkdtemp(prefix="ultralytics-"))
    os.environ["YOLO_CONFIG_DIR"] = str(folder)  # settings of Ultralytics are written there
    os.environ["YOLO_OFFLINE"] = "true"
    os.environ["YOLO_VERBOSE"] = "false"
    os.environ["YOLO_AUTOINSTALL"] = "false"
    from ultralytics import YOLO
    from ultralytics.models.yolo.detect import DetectionTrainer

    values = overrides(folder)
    callbacks = {"on_train_start": before, "on_train_batch_end": Batches()}
    try:
        if args.api == "yolo":
            model = YOLO(values.pop("model"))
            for event, callback in callbacks.items():
                model.add_callback(event, callback)
            model.train(**values)
        else:
            trainer = DetectionTrainer(overrides=values)
            for event, callback in callbacks.items():
                trainer.add_callback(event, callback)
            trainer.train()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
