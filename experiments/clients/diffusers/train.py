"""Trains an unconditional diffusion model with diffusers and accelerate, as diffusers' tutorial does, with averaged weights.

torchrun --nproc-per-node 2 train.py [--batch 8] [--accumulate 2] [--no-average] [--mistake]
"""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8, help="Samples of a rank and microbatch.")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--no-average", action="store_true", help="Average no weights, and evaluate nothing.")
parser.add_argument(
    "--mistake", action="store_true", help="Go on training with the averaged weights after the evaluation."
)
args = parser.parse_args()

SIZE = 8


class Images(Dataset):
    """Random images, with the noise and the timestep of each."""

    def __init__(self, number: int, timesteps: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.rand(number, 3, SIZE, SIZE, generator=generator) * 2 - 1
        self.noise = torch.randn(number, 3, SIZE, SIZE, generator=generator)
        self.timesteps = torch.randint(timesteps, (number,), generator=generator)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"images": self.images[index], "noise": self.noise[index], "timesteps": self.timesteps[index]}


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.accumulate)
    model = UNet2DModel(
        sample_size=SIZE,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    noise_scheduler = DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    lr_scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=0, num_training_steps=2 * args.steps)
    data = Images(8 * args.steps, 100, seed=1)
    validation = Images(8, 100, seed=2)[:]
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=args.batch))
    unwrapped = accelerator.unwrap_model(model)
    average = None if args.no_average else EMAModel(unwrapped.parameters(), decay=0.95)

    def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        noisy = noise_scheduler.add_noise(batch["images"], batch["noise"], batch["timesteps"])
        return F.mse_loss(model(noisy, batch["timesteps"], return_dict=False)[0], batch["noise"])

    steps = 0
    for batch in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if accelerator.sync_gradients:
                lr_scheduler.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        steps += 1
        accelerator.print(f"step {steps} loss {loss.item():.5f} lr {lr_scheduler.get_last_lr()[0]:.6f}")
        if average is None:
            continue
        average.step(unwrapped.parameters())
        if steps % 3 == 0:
            if not args.mistake:
                average.store(unwrapped.parameters())
            average.copy_to(unwrapped.parameters())
            with torch.no_grad():
                accelerator.print(f"validation loss {loss_of(unwrapped, validation).item():.5f}")
            if not args.mistake:
                average.restore(unwrapped.parameters())
    accelerator.end_training()


if __name__ == "__main__":
    main()
