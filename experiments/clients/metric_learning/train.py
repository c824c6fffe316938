"""Trains embeddings of noisy curves by pytorch-metric-learning: losses, miners, a cross-batch memory, its distributed wrappers.

torchrun --nproc-per-node 2 train.py [--loss memory] [--efficient] [--evaluate] [--fused] [--mistake]
python train.py [--loss proxies] [--indices] [--views [--joint] [--bf16]]

On several ranks DistributedLossWrapper gathers the embeddings of all ranks, and multiplies the loss by their number: DDP averages
gradients, and a rank has those of its own embeddings. With --mistake the miner has no DistributedMinerWrapper, so that it chooses
pairs of a rank's own embeddings alone.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from pytorch_metric_learning import distances, losses, miners
from pytorch_metric_learning.utils import distributed as pml_distributed
from pytorch_metric_learning.utils import loss_and_miner_utils
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=6)
parser.add_argument(
    "--loss",
    choices=["similarity", "memory", "proxies", "contrastive"],
    default="similarity",
    help="Multi-similarity with its miner, contrastive with embeddings of past batches, proxy anchors, or contrastive.",
)
parser.add_argument("--efficient", action="store_true", help="Each rank has only the pairs of its own anchors.")
parser.add_argument("--indices", action="store_true", help="State all pairs by their indices instead of labels.")
parser.add_argument("--views", action="store_true", help="Two noisy views of each curve instead of labels.")
parser.add_argument("--joint", action="store_true", help="One call of the model for both views, and labels of curves.")
parser.add_argument("--evaluate", action="store_true", help="Retrieve the nearest neighbours after each second step.")
parser.add_argument("--bf16", action="store_true", help="autocast(bfloat16) of the model; losses are in float32.")
parser.add_argument("--fused", action="store_true", help="The fused SGD.")
parser.add_argument("--mistake", action="store_true", help="The miner has no wrapper.")
args = parser.parse_args()

CLASSES, PER_CLASS, POINTS, WIDTH = 6, 20, 24, 12
CLASSES_OF_BATCH, OF_CLASS = 4, 4
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))


def curves(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy sums of waves, whose frequencies are those of a class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(CLASSES).repeat_interleave(PER_CLASS)
    time = torch.linspace(0, 1, POINTS)
    phases = torch.rand(len(labels), 1, generator=generator)
    waves = torch.sin(6.28 * ((labels[:, None] + 1) * time + phases)) + 0.5 * torch.cos(9.0 * labels[:, None] * time)
    return waves + 0.3 * torch.randn(waves.shape, generator=generator), labels


def batches(labels: torch.Tensor):
    """Indices of batches: some samples of each of some classes."""
    generator = torch.Generator().manual_seed(4)
    for _ in range(args.steps):
        chosen = torch.randperm(CLASSES, generator=generator)[:CLASSES_OF_BATCH]
        rows = []
        for each in chosen:
            of_class = (labels == each).nonzero().flatten()
            rows.append(of_class[torch.randperm(len(of_class), generator=generator)[:OF_CLASS]])
        rows = torch.cat(rows)
        yield rows[torch.randperm(len(rows), generator=generator)]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv1d(1, 8, 5, padding=2),
            nn.GroupNorm(2, 8),
            nn.GELU(),
            nn.Conv1d(8, 12, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Flatten(),
        )
        self.embedder = nn.Linear(12 * POINTS // 2, WIDTH)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            embeddings = self.embedder(self.trunk(x[:, None]))
        return embeddings.float()


def criterion() -> nn.Module:
    if args.loss == "similarity":
        loss = losses.MultiSimilarityLoss(alpha=2.0, beta=10.0, base=0.5)
    elif args.loss == "memory":
        contrastive = losses.ContrastiveLoss(pos_margin=0.9, neg_margin=0.3, distance=distances.CosineSimilarity())
        loss = losses.CrossBatchMemory(contrastive, embedding_size=WIDTH, memory_size=32)
    elif args.loss == "proxies":
        loss = losses.ProxyAnchorLoss(CLASSES, WIDTH, margin=0.1, alpha=8)
    else:
        loss = losses.ContrastiveLoss(pos_margin=0.2, neg_margin=1.2)
    if RANKS > 1:
        loss = pml_distributed.DistributedLossWrapper(loss, efficient=args.efficient)
    return loss


def mining() -> nn.Module | None:
    if args.loss != "similarity":
        return None
    miner = miners.MultiSimilarityMiner(epsilon=0.2)
    if RANKS > 1 and not args.mistake:
        miner = pml_distributed.DistributedMinerWrapper(miner, efficient=args.efficient)
    return miner


def recall(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of samples whose nearest neighbour is of their class."""
    model.eval()
    with torch.no_grad():
        similar = distances.CosineSimilarity()(model(inputs))
    similar.fill_diagonal_(-2)
    model.train()
    return (labels[similar.argmax(1)] == labels).float().mean().item()


def loss_of_views(model: nn.Module, inputs: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
    views = [inputs + 0.2 * torch.randn(inputs.shape, generator=noise) for _ in range(2)]
    if args.joint:
        embeddings = model(torch.cat(views))
        return losses.NTXentLoss(temperature=0.2)(embeddings, torch.arange(len(inputs)).repeat(2))
    return losses.SelfSupervisedLoss(losses.NTXentLoss(temperature=0.2))(model(views[0]), model(views[1]))


def main() -> None:
    if RANKS > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    encoder, loss_fn, miner = Encoder(), criterion(), mining()
    model = DistributedDataParallel(encoder) if RANKS > 1 else encoder
    inputs, labels = curves(1)
    test = curves(2)
    noise = torch.Generator().manual_seed(5)
    parameters = [*model.parameters(), *loss_fn.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=args.fused or None)
    for step, rows in enumerate(batches(labels)):
        mine = rows[RANK::RANKS]
        optimizer.zero_grad()
        if args.views:
            loss = loss_of_views(model, inputs[mine], noise)
        else:
            embeddings = model(inputs[mine])
            if args.indices:
                loss = loss_fn(embeddings, indices_tuple=loss_and_miner_utils.get_all_pairs_indices(labels[mine]))
            elif miner is None:
                loss = loss_fn(embeddings, labels[mine])
            else:
                loss = loss_fn(embeddings, labels[mine], miner(embeddings, labels[mine]))
        loss.backward()
        optimizer.step()
        if RANK == 0:
            print(f"step {step} loss {loss.item():.9g}")
        if args.evaluate and step % 2:
            found = recall(encoder, *test)
            if RANK == 0:
                print(f"recall {found:.4f}")
    if RANKS > 1:
        dist.barrier()
        time.sleep(0.3)  # lets threads of gloo release their last work: the process can hang otherwise
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
