"""Units inside and around `replicate`, as DistributedDataParallel does it."""

from typing import Any

import torch
from torch import nn
from torch.distributed._composable.replicate import replicate

from tests.on_torch.fsdp2.scripts import refusal, scenario
from tests.on_torch.helpers.fsdp2_models import linears, look, trained_linears
from tests.on_torch.helpers.scripts import Side


def _beside_replicas(side: Side, around: bool) -> list[Any]:
    model = linears(4, 6, 5, 3)
    if around:
        side.fully_shard(model[1])
        replicate(model)
    else:
        replicate(model[1])
        side.fully_shard(model[0])
        side.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    return [trained_linears(side, model, optimizer=optimizer), look(model)]


@scenario()
def replicate_around_units(side):
    return _beside_replicas(side, around=True)


@scenario()
def units_around_replicate(side):
    return _beside_replicas(side, around=False)


@refusal()
def replicating_a_unit(side):
    replicate(side.fully_shard(nn.Linear(4, 2)))
