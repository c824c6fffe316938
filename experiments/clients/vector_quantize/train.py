"""Trains an autoencoder of images with vector-quantize-pytorch, whose codes are moving averages over the samples of all ranks.

torchrun --nproc-per-node 2 train.py [--accumulate 2] [--bf16] [--evaluate] [--compile] [--mistake]
python train.py --residual [--own]

VectorQuantize updates its codes in forward. accum_ema_update postpones this: counts and sums of a microbatch are added to
those of the next call. With --mistake microbatches do not have it, so that codes change after each microbatch, within a step.
"""

import argparse
import contextlib
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from vector_quantize_pytorch import ResidualVQ, VectorQuantize

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2, help="Each has three steps.")
parser.add_argument("--accumulate", type=int, default=1, help="Microbatches of a step.")
parser.add_argument("--bf16", action="store_true", help="autocast(bfloat16); codes stay in float32.")
parser.add_argument("--compile", action="store_true", help="torch.compile of the decoder.")
parser.add_argument("--residual", action="store_true", help="Two codes of each place, by ResidualVQ.")
parser.add_argument("--own", action="store_true", help="A loop over VectorQuantize instead of ResidualVQ.")
parser.add_argument("--evaluate", action="store_true", help="Evaluate after each epoch.")
parser.add_argument("--mistake", action="store_true", help="All microbatches update the codes; needs --accumulate.")
args = parser.parse_args()

SIZE, IMAGES, BATCH, WIDTH, CODES = 16, 48, 16, 8, 12
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))


def images(number: int, seed: int) -> torch.Tensor:
    """Bright blobs on a gradient."""
    generator = torch.Generator().manual_seed(seed)
    centres = SIZE * torch.rand(number, 2, 1, 1, generator=generator)
    radius = 2 + 3 * torch.rand(number, 1, 1, generator=generator)
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    squares = (rows - centres[:, 0]) ** 2 + (columns - centres[:, 1]) ** 2
    slope = torch.rand(number, 1, 1, generator=generator) * columns / SIZE
    noise = 0.05 * torch.randn(number, SIZE, SIZE, generator=generator)
    return (torch.exp(-squares / radius**2) + slope + noise)[:, None]


class OwnResidual(nn.Module):
    """ResidualVQ, written out, with the layers of one."""

    def __init__(self, layers: nn.ModuleList):
        super().__init__()
        self.layers = layers

    def forward(self, x, accum_ema_update=False):
        total, indices, losses = 0.0, [], []
        for layer in self.layers:
            quantized, index, loss = layer(x, accum_ema_update=accum_ema_update)
            total = total + quantized
            x = x - quantized.detach()
            indices.append(index)
            losses.append(loss)
        return total, torch.stack(indices, -1), torch.stack(losses, -1)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 4, stride=2, padding=1),
            nn.GroupNorm(4, 16),
            nn.GELU(),
            nn.Conv2d(16, WIDTH, 4, stride=2, padding=1),
        )
        options = {
            "dim": WIDTH,
            "codebook_size": CODES,
            "decay": 0.7,
            "commitment_weight": 0.5,
            "rotation_trick": False,
        }
        if args.residual:
            self.quantizer = ResidualVQ(num_quantizers=2, **options)
            if args.own:
                self.quantizer = OwnResidual(self.quantizer.layers)
        else:
            self.quantizer = VectorQuantize(**options)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(WIDTH, 16, 4, stride=2, padding=1),
            nn.GELU(),
            nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1),
        )

    def forward(self, x, postponed=False):
        features = self.encoder(x)
        places = features.flatten(2).transpose(1, 2)
        quantized, codes, commitment = self.quantizer(places, **({"accum_ema_update": True} if postponed else {}))
        decoded = self.decoder(quantized.transpose(1, 2).reshape(features.shape))
        return decoded, codes, commitment.sum()


def evaluate(model: nn.Module, test: torch.Tensor) -> tuple[float, int]:
    """The error, and the number of codes that are used. In evaluation codes are not updated."""
    model.eval()
    with torch.no_grad():
        decoded, codes, _ = model(test)
    model.train()
    return functional.mse_loss(decoded, test).item(), len(codes.unique())


def main() -> None:
    if RANKS > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    network = Autoencoder()
    if args.compile:
        network.decoder = torch.compile(network.decoder)
    model = DistributedDataParallel(network) if RANKS > 1 else network
    data, test = TensorDataset(images(IMAGES, 1)), images(12, 2)
    sampler = DistributedSampler(data, RANKS, RANK, seed=3)
    loader = DataLoader(data, BATCH // RANKS, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-6)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for number, (batch,) in enumerate(loader):
            optimizer.zero_grad()
            total = 0.0
            parts = batch.chunk(args.accumulate)
            for index, part in enumerate(parts):
                last = index == len(parts) - 1
                with contextlib.nullcontext() if last or RANKS == 1 else model.no_sync():
                    with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
                        decoded, _, commitment = model(part, postponed=not (last or args.mistake))
                        loss = (functional.mse_loss(decoded.float(), part) + commitment) / len(parts)
                    loss.backward()
                total += loss.item()
            optimizer.step()
            mean = torch.tensor(total)
            if RANKS > 1:
                dist.all_reduce(mean)
            if RANK == 0:
                print(f"epoch {epoch} batch {number} loss {mean.item() / RANKS:.9g}")
        if args.evaluate:
            error, used = evaluate(network, test)
            if RANK == 0:
                print(f"test error {error:.6f} codes {used}")
    if RANKS > 1:
        dist.barrier()
        time.sleep(0.3)  # lets threads of gloo release their last work: the process can hang otherwise
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
