"""Hybrid sharding."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import torch
from torch.distributed.tensor import DTensor, Shard

from tests.on_torch.fsdp2.scripts import scenario
from tests.on_torch.helpers.fsdp2_models import (
    hybrid_mesh,
    linears,
    look,
    sharded_net,
    trained,
    trained_linears,
    values,
)
from tests.on_torch.helpers.models import loss_of
from tests.on_torch.helpers.scripts import inputs


@scenario(num_ranks=4)
def hybrid(side):
    results = []
    for options in (
        {},
        {"reshard_after_forward": False},
        {"mp_policy": side.MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    ):
        model = sharded_net(side, mesh=hybrid_mesh(), **options)
        results += [look(model), trained(side, model), look(model)]
    return results


@scenario(num_ranks=4)
def hybrid_with_hooks_and_factors(side):
    seen = []
    model = sharded_net(side, mesh=hybrid_mesh())
    for unit in (model, *model.blocks):
        unit.set_all_reduce_hook(lambda reduced: (seen.append(reduced.clone()), reduced.add_(1)))
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_gradient_divide_factor(3.0)
    model.set_requires_gradient_sync(False)
    loss_of(model, 0, side.rank).backward()
    model.set_requires_gradient_sync(True)
    loss_of(model, 1, side.rank).backward()
    return [values(model), seen]


@scenario(num_ranks=4)
def hybrid_states(side):
    model = sharded_net(side, mesh=hybrid_mesh())
    loss_of(model, 0, side.rank).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    full = {name: value.full_tensor() for name, value in model.state_dict().items() if isinstance(value, DTensor)}
    return [norm.full_tensor(), full, model.state_dict(), values(model)]


@scenario(num_ranks=4)
def hybrid_with_fewer_ranks_after_forward(side):
    """Two ranks are the whole shard group, so 2 means the same as True."""
    model = side.fully_shard(linears(8, 4), mesh=hybrid_mesh(), reshard_after_forward=2)
    model(inputs(side, width=8)).sum().backward()
    return [look(model), values(model)]


@scenario(num_ranks=4)
def hybrid_and_cut_on_other_dims(side):
    model = linears(4, 6, 2)
    cut = {"mesh": hybrid_mesh(), "shard_placement_fn": lambda param: Shard(param.ndim - 1)}
    side.fully_shard(model[0], **cut)
    return [trained_linears(side, side.fully_shard(model, **cut)), look(model)]
