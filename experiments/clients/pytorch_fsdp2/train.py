"""Trains a small transformer on random tokens with fully_shard, in the style of the FSDP2 script of pytorch/examples.

torchrun --nproc-per-node 2 train.py [--parallel crossframe] [--explicit-prefetching] [--mixed-precision] [--mistake]
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--parallel", choices=["torch", "crossframe", "ddp", "none"], default="torch")
parser.add_argument("--explicit-prefetching", action="store_true")
parser.add_argument("--mixed-precision", action="store_true")
parser.add_argument("--batch", type=int, default=4, help="Samples of a rank.")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--mistake", action="store_true", help="Leave reduce_dtype out: gradients are reduced in bfloat16.")
args = parser.parse_args()

if args.parallel == "crossframe":
    from torch_backend import FSDPModule, MixedPrecisionPolicy, fully_shard
else:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 96, 16, 32, 4, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wv = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.wq, self.wk, self.wv)]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))

    def reset_parameters(self) -> None:
        for layer in (self.wq, self.wk, self.wv, self.wo):
            layer.reset_parameters()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.ffn_norm = nn.LayerNorm(WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.pos_embeddings = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens) + self.pos_embeddings(torch.arange(LENGTH))
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x)).float()


def shard(model: Transformer) -> None:
    keywords = {}
    if args.mixed_precision:
        reduce_dtype = None if args.mistake else torch.float32
        keywords["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for layer in model.layers:
        fully_shard(layer, **keywords)
    fully_shard(model, **keywords)
    assert isinstance(model, FSDPModule)
    if args.explicit_prefetching:
        layers = list(model.layers)
        for i, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 3])
            layer.set_modules_to_backward_prefetch(layers[max(i - 2, 0) : i][::-1])


def batch(step: int, rank: int, ranks: int) -> torch.Tensor:
    """The samples of a rank: those of all ranks together do not depend on the number of ranks."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(VOCABULARY, (ranks * args.batch, LENGTH + 1), generator=generator)
    return tokens[rank * args.batch : (rank + 1) * args.batch]


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model: nn.Module = Transformer()
    if args.parallel == "ddp":
        model = DistributedDataParallel(model)
    elif args.parallel != "none":
        shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(args.steps):
        if args.explicit_prefetching:
            model.unshard(async_op=True)
        tokens = batch(step, rank, ranks)
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
