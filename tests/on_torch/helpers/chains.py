"""Chains of units, and their gradients beside those of the plain model."""

import torch
import torch.distributed as dist
from torch import nn

import torch_backend
from torch_backend.shards import local_pieces, sharded_units

FSDP = torch_backend.FullyShardedDataParallel
MODES = ("flat", "orig", "fsdp2")


def shard(model, mode, strategy="FULL_SHARD"):
    """Every child that says so is a unit, and the root."""
    units = [module for module in model.modules() if getattr(module, "is_unit", False)]
    if mode == "fsdp2":
        for module in units:
            torch_backend.fully_shard(module, reshard_after_forward=strategy == "FULL_SHARD")
        return torch_backend.fully_shard(model)
    options = {"use_orig_params": mode == "orig", "sharding_strategy": torch_backend.ShardingStrategy[strategy]}
    for name, child in list(model.named_children()):
        if getattr(child, "is_unit", False):
            setattr(model, name, FSDP(child, **options))
    return FSDP(model, **options)


def mean_grads(model, loss_fn, rank, world_size):
    """The mean over ranks of the gradients of an unsharded model, by name; zeros where a rank has none."""
    loss_fn(model).backward()
    found = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            grad = torch.zeros_like(p) if p.grad is None else p.grad.clone()
            dist.all_reduce(grad)
            found[name] = grad / world_size
    return found


def assert_grads(rank, world_size, mode, make, loss_fn, strategy="FULL_SHARD"):
    """One step of `make()`, sharded, gives the mean gradients of the plain model. Returns how many were compared.

    In float64: two ranks add in either order to the same bits, and three to within an ulp or two.
    """
    torch.manual_seed(0)
    expected = mean_grads(make().double(), loss_fn, rank, world_size)
    torch.manual_seed(0)
    model = shard(make().double(), mode, strategy)
    loss_fn(model).backward()
    compared = 0
    for piece in local_pieces(model, rank):
        if piece.name in expected:
            wanted = expected[piece.name].flatten()[piece.start : piece.stop]
            got = torch.zeros_like(wanted) if piece.grad is None else piece.grad
            assert torch.allclose(got, wanted, rtol=1e-13, atol=1e-15), piece.name
            compared += 1
    # Everything is freed, and shown as shards again.
    for _, buckets in sharded_units(model):
        assert all(bucket.buffer.full.untyped_storage().nbytes() == 0 for bucket in buckets)
    return compared


class Part(nn.Module):
    """A unit of two layers."""

    is_unit = True

    def __init__(self, width=4):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class Chain(nn.Module):
    """A trained layer, three parts, a head."""

    part = Part

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.u, self.v, self.w = self.part(), self.part(), self.part()
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.w(self.v(self.u(self.first(x)))))


def square(model):
    x = torch.arange(8.0, dtype=torch.float64).view(2, 4) + dist.get_rank()
    return model(x).square().sum()


class Penalised(Chain):
    """A penalty on parameters(), inside forward."""

    def forward(self, x):
        penalty = sum(p.square().sum() for p in [*self.first.parameters(), *self.head.parameters()])
        return super().forward(x) + penalty


def chain_of(part):
    return type(f"ChainOf{part.__name__}", (Chain,), {"part": part})
