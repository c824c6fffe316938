"""Trains a decoder of x_transformers on random tokens with AdamWScheduleFree, with DDP or FSDP2, and evaluates it in between.

torchrun --nproc-per-node 2 train.py [--parallel fsdp2 [--mistake]] [--batch 2 --accumulate 2] [--flash] [--no-foreach]

With --mistake an evaluation leaves the parameters of the root unit unsharded. The next forward uses these averaged parameters,
although the optimizer is in train mode again.
"""

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from schedulefree import AdamWScheduleFree
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

parser = argparse.ArgumentParser()
parser.add_argument("--parallel", choices=["ddp", "fsdp2", "none"], default="ddp")
parser.add_argument("--batch", type=int, default=4, help="Samples of a rank and microbatch.")
parser.add_argument("--accumulate", type=int, default=1, help="Microbatches of a step.")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--evaluate", type=int, default=3, help="Steps between evaluations; 0: none.")
parser.add_argument("--flash", action="store_true", help="scaled_dot_product_attention instead of einsum and softmax.")
parser.add_argument("--no-foreach", action="store_true", help="One parameter at a time in the optimizer.")
parser.add_argument("--mistake", action="store_true", help="FSDP2: do not reshard the root unit after an evaluation.")
args = parser.parse_args()

VOCABULARY, LENGTH, SAMPLES = 64, 16, 8


class Tokens(Dataset):
    """Random walks over the vocabulary."""

    def __init__(self, number: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        steps = torch.randint(1, 4, (number, LENGTH + 1), generator=generator)
        self.tokens = steps.cumsum(1) % VOCABULARY

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tokens[index]


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    net = TransformerWrapper(
        num_tokens=VOCABULARY,
        max_seq_len=LENGTH,
        attn_layers=Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, rotary_pos_emb=True, attn_flash=args.flash),
    )
    model = AutoregressiveWrapper(net)
    if args.parallel == "ddp":
        model = DistributedDataParallel(model)
    elif args.parallel == "fsdp2":
        for _, block, _ in net.attn_layers.layers:
            fully_shard(block)
        fully_shard(model)
    optimizer = AdamWScheduleFree(
        model.parameters(), lr=1e-2, weight_decay=0.01, warmup_steps=2, foreach=not args.no_foreach
    )
    data = Tokens(SAMPLES * args.steps, seed=1)
    sampler = DistributedSampler(data, num_replicas=ranks, rank=rank, shuffle=False)
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler)
    validation = Tokens(SAMPLES, seed=2)[:]

    batches = iter(loader)
    for step in range(args.steps):
        model.train()
        optimizer.train()
        total = 0.0
        for micro in range(args.accumulate):
            last = micro == args.accumulate - 1
            if args.parallel == "fsdp2":
                model.set_requires_gradient_sync(last)
            with nullcontext() if last or args.parallel != "ddp" else model.no_sync():
                loss = model(next(batches)) / args.accumulate
                loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {total:.9g}")
        if args.evaluate and (step + 1) % args.evaluate == 0:
            model.eval()
            optimizer.eval()
            with torch.no_grad():
                seen = model(validation)
            if args.parallel == "fsdp2" and not args.mistake:
                model.reshard()  # the root unit keeps its parameters for a backward
            if rank == 0:
                print(f"evaluation {seen.item():.9g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
