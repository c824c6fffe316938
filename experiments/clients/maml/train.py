"""Trains a classifier to learn from a few examples, by MAML in plain torch: torch.func's functional_call, grad and vmap.

python train.py [--way autograd|func|vmap] [--accumulate 2] [--float64] [--average] [--mistake]
"""

import argparse

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--tasks", type=int, default=4, help="Tasks of a step.")
parser.add_argument("--inner", type=int, default=2, help="Steps within a task.")
parser.add_argument("--way", choices=["autograd", "func", "vmap"], default="autograd")
parser.add_argument("--accumulate", type=int, default=1, help="Groups of tasks, one backward each.")
parser.add_argument("--average", action="store_true", help="Average weights by swa_utils, and evaluate them.")
parser.add_argument("--float64", action="store_true")
parser.add_argument(
    "--mistake", action="store_true", help="A backward within tasks, to watch the norms of their gradients."
)
args = parser.parse_args()

FEATURES, WAYS, SHOTS = 12, 4, 3
dtype = torch.float64 if args.float64 else torch.float32
norms = []


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 32)
        self.second = nn.Linear(32, 32)
        self.head = nn.Linear(32, WAYS)

    def forward(self, x):
        x = F.gelu(self.first(x))
        return self.head(x + F.gelu(self.second(x)))


def tasks(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Examples to learn from, further ones to judge by, and the labels of either: a task has centers of its own."""
    generator = torch.Generator().manual_seed(1000 + seed)
    centers = torch.randn(args.tasks, 1, WAYS, FEATURES, generator=generator)
    draws = 0.7 * torch.randn(2, args.tasks, SHOTS, WAYS, FEATURES, generator=generator)
    support, query = (centers + draws).flatten(2, 3).to(dtype)
    return support, query, torch.arange(WAYS).repeat(SHOTS)


def loss_of(net, params, x, y):
    return F.cross_entropy(functional_call(net, params, (x,)), y)


def adapt(net, params, x, y):
    """Steps of gradient descent within a task, through which the gradient of the meta loss goes."""
    for _ in range(args.inner):
        if args.way == "autograd":
            loss = loss_of(net, params, x, y)
            if args.mistake:
                loss.backward(retain_graph=True)
                norms.append(nn.utils.get_total_norm([p.grad for p in net.parameters()]))
            grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
            grads = dict(zip(params, grads, strict=True))
        else:
            grads = grad(lambda p: loss_of(net, p, x, y))(params)
        params = {name: p - 0.1 * grads[name] for name, p in params.items()}
    return params


def meta_loss(net, support, query, labels):
    params = dict(net.named_parameters())
    if args.way == "vmap":

        def of_task(x, z):
            return loss_of(net, adapt(net, params, x, labels), z, labels)

        return vmap(of_task)(support, query).mean()
    losses = []
    for x, z in zip(support, query, strict=True):
        losses.append(loss_of(net, adapt(net, params, x, labels), z, labels))
    return torch.stack(losses).mean()


def main() -> None:
    torch.manual_seed(0)
    net = Net().to(dtype)
    optimizer = torch.optim.RAdam(net.parameters(), lr=1e-2, weight_decay=1e-3, decoupled_weight_decay=True)
    scheduler = SWALR(optimizer, swa_lr=5e-3, anneal_epochs=args.steps)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if args.average else None
    for step in range(args.steps):
        support, query, labels = tasks(step)
        optimizer.zero_grad()
        total = 0.0
        for x, z in zip(support.chunk(args.accumulate), query.chunk(args.accumulate), strict=True):
            loss = meta_loss(net, x, z, labels) / args.accumulate
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_value_(net.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        print(f"step {step} loss {total:.9g}")
        if average is not None:
            average.update_parameters(net)
    if average is not None:
        support, query, labels = tasks(-1)
        print(f"average {meta_loss(average.module, support, query, labels).item():.9g}")


if __name__ == "__main__":
    main()
