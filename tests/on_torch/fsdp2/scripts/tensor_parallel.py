"""Tensor and sequence parallelism."""

# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportOptionalMemberAccess=false, reportPrivateImportUsage=false, reportReturnType=false

import copy
import functools
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import checkpoint as checkpoint_by_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from tests.on_torch.fsdp2.scripts import scenario
from tests.on_torch.helpers.device import DEVICE
from tests.on_torch.helpers.fsdp2_models import linears, look, mesh_of, parallel, values
from tests.on_torch.helpers.scenarios import EVERY
from tests.on_torch.helpers.scripts import Side, inputs


def trained_in_parallel(side: Side, how: str, dtype: torch.dtype = torch.float32, **options: Any) -> list[Any]:
    model = parallel(side, how, dtype, **options)
    group = side.rank // 2
    data = torch.Generator(DEVICE).manual_seed(15)
    x = torch.randn(2, 3, 4, 6, generator=data, dtype=dtype)[group]
    if how == "sequence":
        x = x.chunk(2, dim=1)[side.rank % 2]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
    full = {name: [p.full_tensor().detach(), p.grad.full_tensor()] for name, p in model.named_parameters()}
    return [loss.detach(), values(model), full, look(model)]


@scenario(num_ranks=4)
def tensor_parallel(side):
    return trained_in_parallel(side, "columns")


def _checkpointed_in_parallel(side: Side, how: str, reshard: bool) -> list[Any]:
    """Tensor parallelism with activation checkpointing in each way that torch offers."""

    class Checkpointed(nn.Module):
        """Recomputes `inner` in backward."""

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=how.endswith("reentrant"))

    mesh = mesh_of((2, 2), ("dp", "tp"))
    model = linears(6, 8, 6, 8, 6)
    parts = nn.Sequential()
    for i in (0, 2):
        layers = nn.Sequential(model[i], nn.ReLU(), model[i + 1])
        parallelize_module(layers, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if how == "by_hooks":
            checkpoint_by_hooks(layers)
        part = checkpoint_wrapper(layers) if how == "by_wrapper" else layers
        part = Checkpointed(part) if how.startswith("inside") else part
        side.fully_shard(part, mesh=mesh["dp"], reshard_after_forward=reshard)
        parts.append(Checkpointed(part) if how.startswith("around") else part)
    side.fully_shard(parts, mesh=mesh["dp"], reshard_after_forward=reshard)
    for step in range(2):
        x = inputs(side, step, 6).requires_grad_()
        dist.broadcast(x.detach(), group=mesh["tp"].get_group(), group_src=0)
        parts(x).square().sum().backward()
    return values(parts)


for _way in ("by_hooks", "by_wrapper", "inside", "inside_reentrant", "around", "around_reentrant"):
    # Recomputation gathers again or not, in turn.
    for _reshard in (True, False) if EVERY else (_way in ("by_hooks", "inside_reentrant", "around"),):
        scenario(4, name=f"tensor_parallel_checkpointed_{_way}_{'resharded' if _reshard else 'kept'}")(
            functools.partial(_checkpointed_in_parallel, how=_way, reshard=_reshard)
        )


@scenario(num_ranks=4)
def tensor_parallel_parameters_in_the_loss(side):
    """A penalty on unsharded parameters outside forward, one of which was frozen at first."""
    model = parallel(side, "columns", torch.float32)
    model[1].down.bias.requires_grad_(False)
    model[1].down.bias.requires_grad_(True)
    loss = model(torch.ones(3, 6) * (1 + side.rank // 2)).square().sum()
    for part in model:
        part.unshard()
    penalty = sum(
        p.full_tensor().square().sum() if isinstance(p, DTensor) else p.square().sum() for p in model.parameters()
    )
    (loss + 4 * penalty).backward()
    return values(model)


@scenario(num_ranks=4)
def tensor_parallel_in_low_precision(side):
    return trained_in_parallel(side, "columns", mp_policy=side.MixedPrecisionPolicy(torch.bfloat16, torch.float32))


@scenario(num_ranks=4)
def sequenceparallel(side):
    return trained_in_parallel(side, "sequence")


@scenario(num_ranks=4)
def tensor_parallel_cut_on_other_dims(side):
    """Sharded on the dim that tensor parallelism does not shard."""
    return trained_in_parallel(
        side, "columns", shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 and p.shape[1] % 4 == 0 else None
    )


@scenario(num_ranks=4)
def tensor_parallel_from_meta(side):
    with torch.device("meta"):
        model = parallel(side, "columns", torch.float32)
    seen = look(model)
    model.to_empty(device=DEVICE.type)
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().copy_(torch.linspace(-1, 1, param.to_local().numel()).view(param.to_local().shape))
    model(torch.ones(3, 6) * (1 + side.rank // 2)).square().sum().backward()
    return [seen, values(model)]


def _in_replicas(side: Side, shape: tuple[int, int, int]) -> list[Any]:
    mesh = mesh_of(shape, ("replicate", "shard", "tp"))
    model = linears(6, 8, 4)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    side.fully_shard(model[0], mesh=mesh["replicate", "shard"])
    side.fully_shard(model, mesh=mesh["replicate", "shard"])
    model(torch.ones(3, 6) * (1 + side.rank // 2)).square().sum().backward()
    return [look(model), values(model)]


# Replicas, shards and ranks of tensor parallelism: each axis of one rank in turn, then all of two.
for _shape in ((1, 2, 2), (2, 1, 2), (2, 2, 1), (2, 2, 2)):
    scenario(math.prod(_shape), name=f"tensor_parallel_in_replicas_{'x'.join(map(str, _shape))}")(
        functools.partial(_in_replicas, shape=_shape)
    )


@scenario(num_ranks=4)
def tensor_parallel_states(side):
    """State dicts and loading of parameters on two axes."""
    model = parallel(side, "columns", torch.float32)
    model(torch.ones(3, 6) * (1 + side.rank // 2)).square().sum().backward()
    state = copy.deepcopy(model.state_dict())
    fresh = parallel(side, "columns", torch.float32)
    with torch.no_grad():
        for param in fresh.parameters():
            param.zero_()
    fresh.load_state_dict(state)
    return [state, values(model), values(fresh)]
