"""Trains a small classifier of images by the Runner of mmengine, as its examples do: hooks, registries and an OptimWrapper.

torchrun --nproc-per-node 2 train.py [--batch 2 --accumulate 2] [--loop iter] [--ema] [--checkpointing] [--fused] [--mistake]

mmengine adds up all entries of the dictionary that the model returns whose names contain "loss". With --mistake that is so of the
cross entropy without label smoothing, too, which is only to be logged.

The script initializes the process group itself and wraps the model without device_ids: mmengine asks CUDA for a device.
"""

import argparse
import os
import shutil
import tempfile

import torch
import torch.distributed as dist
from mmengine.dataset import DefaultSampler
from mmengine.evaluator import BaseMetric
from mmengine.hooks import EMAHook, Hook
from mmengine.model import BaseModel, BaseModule
from mmengine.runner import Runner
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=4, help="Images of a rank and iteration.")
parser.add_argument("--accumulate", type=int, default=1, help="Iterations of a step.")
parser.add_argument("--loop", choices=["epoch", "iter"], default="epoch", help="The training loop of mmengine.")
parser.add_argument("--schedule", choices=["epoch", "iter"], default="epoch", help="What the schedule counts.")
parser.add_argument("--ema", action="store_true", help="EMAHook, whose average is evaluated after each epoch.")
parser.add_argument("--checkpointing", action="store_true", help="Activation checkpointing of the second stage.")
parser.add_argument("--fused", action="store_true", help="The fused AdamW.")
parser.add_argument("--mistake", action="store_true", help="The logged cross entropy has a name with loss in it.")
args = parser.parse_args()

CLASSES, SIZE, IMAGES, EPOCHS = 5, 16, 32, 2
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


class Shapes(Dataset):
    """Noisy images of templates; each image is the same whenever it is read."""

    def __init__(self, number: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        templates = torch.randn(CLASSES, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(100))
        self.labels = torch.randint(CLASSES, (number,), generator=generator)
        self.images = templates[self.labels] + torch.randn(number, 3, SIZE, SIZE, generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"images": self.images[index], "labels": self.labels[index]}


class Stage(BaseModule):
    def __init__(self, width: int, out: int):
        super().__init__(init_cfg={"type": "Kaiming", "layer": "Conv2d"})
        self.conv = nn.Conv2d(width, out, 3, stride=2, padding=1, bias=False)
        self.norm = nn.GroupNorm(4, out)

    def forward(self, x):
        return functional.relu(self.norm(self.conv(x)))


class Classifier(BaseModel):
    def __init__(self):
        super().__init__()
        self.stages = nn.Sequential(Stage(3, 8), Stage(8, 16))
        self.head = nn.Linear(16, CLASSES)
        self.auxiliary = nn.Linear(8, CLASSES)

    def forward(self, images, labels, mode="tensor"):
        middle = self.stages[0](images)
        logits = self.head(self.stages[1](middle).mean((2, 3)))
        if mode == "predict":
            return [(int(guess), int(label)) for guess, label in zip(logits.argmax(1), labels, strict=True)]
        if mode == "tensor":
            return logits
        auxiliary = self.auxiliary(middle.mean((2, 3)))
        logged = "ce_loss" if args.mistake else "cross_entropy"
        return {
            "loss_head": functional.cross_entropy(logits, labels, label_smoothing=0.1),
            "loss_auxiliary": 0.4 * functional.cross_entropy(auxiliary, labels),
            logged: functional.cross_entropy(logits, labels),
        }


class Accuracy(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results += [guess == label for guess, label in data_samples]

    def compute_metrics(self, results):
        return {"accuracy": sum(results) / len(results)}


class Printing(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if dist.get_rank() == 0:
            rate = runner.optim_wrapper.get_lr()["lr"][0]
            print(f"iteration {runner.iter} loss {outputs['loss'].item():.9g} lr {rate:.6g}")


def main():
    dist.init_process_group("gloo")
    folder = tempfile.mkdtemp(prefix="mmengine-")
    if args.loop == "epoch":
        loop = {"by_epoch": True, "max_epochs": EPOCHS}
    else:
        loop = {"by_epoch": False, "max_iters": EPOCHS * IMAGES // (args.batch * RANKS)}
    if args.schedule == "epoch":
        schedule = [{"type": "MultiStepLR", "by_epoch": True, "milestones": [1], "gamma": 0.3}]
    else:
        schedule = [
            {"type": "LinearLR", "by_epoch": False, "start_factor": 0.25, "begin": 0, "end": 4},
            {"type": "CosineAnnealingLR", "by_epoch": False, "T_max": 8, "begin": 4, "end": 12},
        ]
    optimizer = {"type": "AdamW", "lr": 3e-3, "weight_decay": 0.05} | ({"fused": True} if args.fused else {})
    runner = Runner(
        model={"type": Classifier},
        work_dir=folder,
        train_dataloader={
            "dataset": Shapes(IMAGES, seed=1),
            "batch_size": args.batch,
            "sampler": {"type": DefaultSampler, "shuffle": True, "seed": 3},
            "collate_fn": {"type": "default_collate"},
            "num_workers": 0,
        },
        train_cfg=loop,
        optim_wrapper={
            "type": "OptimWrapper",
            "optimizer": optimizer,
            "accumulative_counts": args.accumulate,
            "clip_grad": {"max_norm": 1.0},
            "paramwise_cfg": {"norm_decay_mult": 0.0, "bias_decay_mult": 0.0},
        },
        param_scheduler=schedule,
        val_dataloader={
            "dataset": Shapes(8, seed=2),
            "batch_size": 4,
            "sampler": {"type": DefaultSampler, "shuffle": False},
            "collate_fn": {"type": "default_collate"},
            "num_workers": 0,
        }
        if args.ema
        else None,
        val_cfg={} if args.ema else None,
        val_evaluator={"type": Accuracy} if args.ema else None,
        default_hooks={"checkpoint": None, "logger": None},
        custom_hooks=[Printing(), *([EMAHook(momentum=0.1)] if args.ema else [])],
        randomness={"seed": 0},
        log_level="WARNING",
        launcher="pytorch",
        cfg={
            "model_wrapper_cfg": {"type": "MMDistributedDataParallel", "device_ids": None},
            **({"activation_checkpointing": ["stages.1"]} if args.checkpointing else {}),
        },
    )
    try:
        runner.train()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()  # lets threads of gloo release their last work: the process can hang otherwise
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
