"""Trains Unet and GaussianDiffusion of denoising_diffusion_pytorch on weighted random images, with an EMA of ema_pytorch.

python train.py [--accumulate 2] [--channels-last] [--flash] [--objective pred_noise] [--no-ema] [--mistake]

With --mistake the weights of samples keep the shape (batch, 1), so that the product with the losses has the shape (batch, batch).
"""

# ruff: noqa: E402

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset

for operator in (
    "nms",
    "qnms",
):  # of torchvision, whose released wheels have them for CUDA alone; nothing here calls them
    torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from denoising_diffusion_pytorch import GaussianDiffusion, Unet
from ema_pytorch import EMA

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1, help="Microbatches of a step; the batch is divided.")
parser.add_argument("--objective", choices=["pred_v", "pred_noise", "pred_x0"], default="pred_v")
parser.add_argument("--no-weights", action="store_true", help="No weights of samples: the loss of GaussianDiffusion.")
parser.add_argument("--mean-outside", action="store_true", help="Average the losses of samples in the script.")
parser.add_argument("--channels-last", action="store_true")
parser.add_argument("--flash", action="store_true", help="scaled_dot_product_attention instead of einsum and softmax.")
parser.add_argument("--fused", action="store_true", help="The fused Adam.")
parser.add_argument("--no-ema", action="store_true")
parser.add_argument("--mistake", action="store_true", help="Multiply losses by weights of the shape (batch, 1).")
args = parser.parse_args()

SIZE, TIMES = 16, 100


def images(number: int) -> TensorDataset:
    """Images, a weight, a time and noise for each."""
    generator = torch.Generator().manual_seed(1)
    shades = torch.rand(number, 3, 1, 1, generator=generator)
    x = (shades + 0.2 * torch.randn(number, 3, SIZE, SIZE, generator=generator)).clamp(0, 1)
    weights = torch.rand(number, 1, generator=generator) + 0.5
    times = torch.randint(TIMES, (number,), generator=generator)
    noise = torch.randn(number, 3, SIZE, SIZE, generator=generator)
    return TensorDataset(x, weights, times, noise)


def main() -> None:
    torch.manual_seed(0)
    model = Unet(dim=16, dim_mults=(1, 2), attn_dim_head=8, attn_heads=2, flash_attn=args.flash)
    diffusion = GaussianDiffusion(
        model, image_size=SIZE, timesteps=TIMES, objective=args.objective, min_snr_loss_weight=True
    )
    if args.channels_last:
        diffusion = diffusion.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(diffusion.parameters(), lr=1e-3, betas=(0.9, 0.99), fused=args.fused or None)
    ema = None if args.no_ema else EMA(diffusion, beta=0.9, update_after_step=0, update_every=2)
    loader = DataLoader(images(args.batch * args.steps), batch_size=args.batch // args.accumulate)

    batches = iter(loader)
    for step in range(args.steps):
        total = 0.0
        for _ in range(args.accumulate):
            x, weights, times, noise = next(batches)
            if args.channels_last:
                x = x.to(memory_format=torch.channels_last)
                noise = noise.to(memory_format=torch.channels_last)
            if args.no_weights and not args.mean_outside:
                loss = diffusion(x, times=times, noise=noise)
            else:
                losses = diffusion(x, times=times, noise=noise, loss_reduction="none")
                if not args.no_weights:
                    losses = losses * (weights if args.mistake else weights.squeeze(1))
                loss = losses.mean()
            loss = loss / args.accumulate
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(diffusion.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if ema is not None:
            ema.update()
        print(f"step {step} loss {total:.9g}")


if __name__ == "__main__":
    main()
