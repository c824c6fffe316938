"""Trains a universal transformer on random tokens: one block, applied four times, with an embedding of the iteration.

python train.py [--functional] [--separate] [--keep-grads] [--accumulate 2] [--optimizer sgd] [--mistake]
"""

import argparse
import math

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1, help="Number of microbatches per step.")
parser.add_argument("--iterations", type=int, default=4, help="How often the block is applied.")
parser.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw")
parser.add_argument("--functional", action="store_true", help="Call the block by functional_call.")
parser.add_argument("--separate", action="store_true", help="Project queries, keys and values by three products.")
parser.add_argument(
    "--keep-grads", action="store_true", help="Zero gradients in place instead of setting them to None."
)
parser.add_argument("--mistake", action="store_true", help="Count an iteration before its embedding is looked up.")
args = parser.parse_args()

TOKENS, LENGTH, WIDTH, HEADS = 48, 16, 32, 4
MINIMUM = 2  # iterations before evaluation may stop


class Projection(nn.Module):
    """Queries, keys and values from one weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / math.sqrt(WIDTH))
        self.bias = nn.Parameter(torch.zeros(3 * WIDTH))

    def forward(self, x):
        if args.separate:
            return tuple(F.linear(x, w, b) for w, b in zip(self.weight.chunk(3), self.bias.chunk(3), strict=True))
        return F.linear(x, self.weight, self.bias).chunk(3, dim=-1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = Projection()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (y.view(B, T, HEADS, C // HEADS).transpose(1, 2) for y in self.project(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    """A pre-norm block whose attention and feed-forward share one norm."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(F.silu(self.up(self.norm(x))))


class UniversalTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.depth = nn.Embedding(args.iterations + 4, WIDTH)  # some more, for deeper evaluation
        self.block = Block()
        self.final_norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def iterate(self, x, iteration):
        x = x + self.depth(torch.tensor(iteration))
        if args.functional:
            return functional_call(self.block, dict(self.block.named_parameters()), (x,))
        return self.block(x)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions
        iteration = 0
        while iteration < MINIMUM:
            x = self.iterate(x, iteration)
            iteration += 1
        while iteration < args.iterations:
            previous = x
            if args.mistake:
                iteration += 1
                x = self.iterate(x, iteration)
            else:
                x = self.iterate(x, iteration)
                iteration += 1
            if not self.training and (x - previous).abs().mean() < 1e-3:
                break
        return self.head(self.final_norm(x))


def sequences(step):
    """Random tokens, and as targets the tokens two places before, modulo a shift."""
    generator = torch.Generator().manual_seed(10 * step + 3)
    inputs = torch.randint(TOKENS, (args.batch, LENGTH), generator=generator)
    return inputs, (inputs.roll(2, dims=1) + 5) % TOKENS


def cross_entropy(model, inputs, targets):
    return F.cross_entropy(model(inputs).reshape(-1, TOKENS), targets.reshape(-1))


def main():
    torch.manual_seed(1)
    model = UniversalTransformer()
    if args.optimizer == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)

    for step in range(args.steps):
        model.train()
        inputs, targets = sequences(step)
        optimizer.zero_grad(set_to_none=not args.keep_grads)
        mean = 0.0
        for x, y in zip(inputs.chunk(args.accumulate), targets.chunk(args.accumulate), strict=True):
            loss = cross_entropy(model, x, y) / args.accumulate
            loss.backward()
            mean += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"step {step} loss {mean:.7f} norm {norm.item():.6f}")

    model.eval()
    with torch.no_grad():
        print(f"held-out loss {cross_entropy(model, *sequences(1000)).item():.6f}")


if __name__ == "__main__":
    main()
