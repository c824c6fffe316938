"""Gradient clipping by torch.nn.utils."""

# pyright: reportAttributeAccessIssue=false

import math

import torch
from torch import nn

from tests.on_torch.fsdp2.scripts import scenario
from tests.on_torch.helpers.fsdp2_models import parallel, sharded_net, values
from tests.on_torch.helpers.models import build_net, loss_of


@scenario()
def gradients_are_clipped(side):
    results = []
    for norm_type, foreach in ((2.0, True), (1, False), (math.inf, True)):
        model = sharded_net(side)
        loss_of(model, 0, side.rank).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type, foreach=foreach)
        results += [norm, norm.full_tensor(), values(model)]
    return results


@scenario()
def some_gradients_are_clipped(side):
    """Only some parameters have gradients; the norm is computed apart from the scaling."""
    model = build_net(depth=2)
    model.spare = nn.Linear(3, 2)
    sharded_net(side, model)
    loss_of(model, 0, side.rank).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None], 3.0)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.02, norm)
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    return [norm.full_tensor(), values(model)]


@scenario(num_ranks=4)
def sequence_parallel_clipped(side):
    model = parallel(side, "sequence", torch.float32)
    model(torch.ones(3, 2, 6) * (1 + side.rank)).square().sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return [norm.full_tensor(), values(model)]
