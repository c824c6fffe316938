"""Trains a variational autoencoder by SVI of Pyro on random binary images, as Pyro's VAE tutorial does.

python train.py [--loop elbo] [--scale poutine] [--logits] [--accumulate 2] [--clip] [--mistake]

With --mistake the guide does not register the encoder by pyro.module, so that the optimizer never updates it.
"""

import argparse

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import Adam, ClippedAdam
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1, help="Microbatches of a step, with --loop torch or elbo.")
parser.add_argument(
    "--loop",
    choices=["svi", "torch", "elbo"],
    default="svi",
    help="svi.step with an optimizer of Pyro, or differentiable_loss with one of torch, or the ELBO as a module.",
)
parser.add_argument("--scale", choices=["plate", "poutine"], default="plate", help="How a batch stands for all images.")
parser.add_argument("--logits", action="store_true", help="Bernoulli of logits instead of probabilities.")
parser.add_argument("--clip", action="store_true", help="Clip values of gradients and decay the rate: ClippedAdam.")
parser.add_argument("--mistake", action="store_true", help="The guide does not register the encoder.")
args = parser.parse_args()

PIXELS, LATENT, HIDDEN = 36, 8, 32
IMAGES = args.batch * args.steps
LR, CLIP, DECAY = 1e-2, 0.5, 0.9


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(PIXELS, HIDDEN)
        self.loc = nn.Linear(HIDDEN, LATENT)
        self.log_scale = nn.Linear(HIDDEN, LATENT)

    def forward(self, x):
        hidden = nn.functional.softplus(self.fc1(x))
        return self.loc(hidden), torch.exp(self.log_scale(hidden))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(LATENT, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, PIXELS)

    def forward(self, z):
        return self.fc2(nn.functional.softplus(self.fc1(z)))


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.decoder = Decoder()

    def _images(self, x):
        size = len(x) if args.scale == "poutine" else IMAGES
        return pyro.plate("images", size=size, subsample=x)

    def model(self, x):
        pyro.module("decoder", self.decoder)
        with self._images(x):
            z = pyro.sample("latent", dist.Normal(x.new_zeros(len(x), LATENT), 1.0).to_event(1))
            logits = self.decoder(z)
            pixels = dist.Bernoulli(logits=logits) if args.logits else dist.Bernoulli(torch.sigmoid(logits))
            pyro.sample("obs", pixels.to_event(1), obs=x)

    def guide(self, x):
        if not args.mistake:
            pyro.module("encoder", self.encoder)
        with self._images(x):
            loc, scale = self.encoder(x)
            pyro.sample("latent", dist.Normal(loc, scale).to_event(1))


def images(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    templates = torch.rand(4, PIXELS, generator=generator)
    kinds = torch.randint(4, (number,), generator=generator)
    return torch.bernoulli(templates[kinds], generator=generator)


def main() -> None:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    vae = VAE()
    model, guide = vae.model, vae.guide
    if args.scale == "poutine":
        # A microbatch stands for as many images as the batch: the sum over microbatches is divided below.
        factor = IMAGES / (args.batch // args.accumulate)
        model, guide = poutine.scale(model, scale=factor), poutine.scale(guide, scale=factor)
    data = images(IMAGES)
    if args.loop == "svi":
        if args.clip:
            optimizer = ClippedAdam({"lr": LR, "clip_norm": CLIP, "lrd": DECAY})
        else:
            optimizer = Adam({"lr": LR})
        svi = SVI(model, guide, optimizer, loss=Trace_ELBO())
        for step in range(args.steps):
            loss = svi.step(data[step * args.batch : (step + 1) * args.batch])
            print(f"step {step} loss {loss / IMAGES:.9g}")
        return

    elbo = Trace_ELBO()
    loss_fn = elbo(model, guide) if args.loop == "elbo" else lambda x: elbo.differentiable_loss(model, guide, x)
    optimizer = torch.optim.Adam(vae.parameters(), lr=LR)
    for step in range(args.steps):
        total = 0.0
        for x in data[step * args.batch : (step + 1) * args.batch].chunk(args.accumulate):
            loss = loss_fn(x) / args.accumulate
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {total / IMAGES:.9g}")


if __name__ == "__main__":
    main()
