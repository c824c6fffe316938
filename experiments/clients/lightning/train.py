"""Trains a convolutional net on random images with lightning's Trainer.

torchrun --nproc-per-node 2 train.py [--fsdp crossframe] [--strategy fsdp1|fsdp2|ddp] [--batch 4] [--accumulate 2] [--mistake]
"""

import argparse
import os
import tempfile

import torch
from torch import nn
from torch.nn import functional

parser = argparse.ArgumentParser()
parser.add_argument("--fsdp", choices=["torch", "crossframe"], default="torch")
parser.add_argument("--strategy", choices=["fsdp1", "fsdp2", "ddp", "auto"], default="fsdp2")
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--batch", type=int, default=4, help="Samples of a rank and microbatch.")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument(
    "--in-order", action="store_true", help="Take images in order: lightning's own sampler shuffles them."
)
parser.add_argument("--mistake", action="store_true", help="Give no sampler to ranks: each trains on the same images.")
options = parser.parse_args()

if options.fsdp == "crossframe":
    import torch_backend

    torch_backend.replace_torch_fsdp()

import lightning  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset  # noqa: E402


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.conv1 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.conv2 = nn.Conv2d(2 * width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv2(functional.silu(self.conv1(self.norm(x))))


class Classifier(lightning.LightningModule):
    """Images to ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))
        self.head = nn.Linear(16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.enter(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))

    def configure_model(self) -> None:
        if options.strategy == "fsdp2":
            for block in self.blocks:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        images, labels = batch
        loss = functional.cross_entropy(self(images), labels, label_smoothing=0.1)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=16)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class OnCpu(FSDPStrategy):
    """lightning refuses the class itself where there is no accelerator."""


def main() -> None:
    lightning.seed_everything(0)
    ranks = int(os.environ["WORLD_SIZE"])
    os.environ.setdefault("GROUP_RANK", "0")
    strategies = {
        "fsdp1": lambda: OnCpu(auto_wrap_policy={Block}, use_orig_params=True),
        "fsdp2": lambda: ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1),
        "ddp": DDPStrategy,
        "auto": lambda: "auto",
    }
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(64, 3, 16, 16, generator=generator)
    labels = torch.randint(0, 10, (64,), generator=generator)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategies[options.strategy](),
        max_steps=options.steps,
        accumulate_grad_batches=options.accumulate,
        use_distributed_sampler=not (options.mistake or options.in_order),
        default_root_dir=tempfile.mkdtemp(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(images, labels)
    sampler = DistributedSampler(data, ranks, int(os.environ["RANK"]), shuffle=False) if options.in_order else None
    trainer.fit(Classifier(), DataLoader(data, batch_size=options.batch, sampler=sampler))


if __name__ == "__main__":
    main()
