"""Edits of parameters, shared and frozen parameters."""

import torch
from torch import nn

from tests.on_torch.fsdp2.scripts import refusal, scenario
from tests.on_torch.helpers.device import DEVICE
from tests.on_torch.helpers.fsdp2_models import linears, look, sharded_net, trained, trained_linears, values
from tests.on_torch.helpers.models import build_net, loss_of, seed_cpu
from tests.on_torch.helpers.scripts import grads, inputs


@scenario()
def edits_of_shards(side):
    model = sharded_net(side)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
            param.to_local().add_(1)
    first = trained(side, model)
    for param in model.parameters():
        param.data.fill_(0.5)
    return [first, trained(side, model)]


@scenario()
def shared_parameters_in_a_unit(side):
    model = sharded_net(side, build_net(depth=2, tied=True))
    return [trained(side, model), model.head.weight is model.embedding.weight]


@scenario()
def a_shared_module(side):
    seed_cpu(9)
    layer = nn.Linear(4, 4)
    model = side.fully_shard(nn.Sequential(layer, nn.ReLU(), layer))
    return trained_linears(side, model)


@scenario()
def frozen_parameters(side):
    model = build_net(depth=2)
    for name, param in model.named_parameters():
        param.requires_grad_("bias" not in name and not name.startswith("blocks.0"))
    sharded_net(side, model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return [look(model), trained(side, model, optimizer=optimizer), look(model)]


@scenario()
def frozen_and_thawed_between_steps(side):
    model = sharded_net(side)
    results = []
    for frozen in ("none", "blocks", "bias", "none"):
        for name, param in model.named_parameters():
            param.requires_grad_(frozen not in name)
        model.zero_grad()
        loss_of(model, 0, side.rank).backward()
        results += [look(model), grads(model)]
    return results


@scenario()
def frozen_at_first_and_thawed(side):
    """Thawed before the first step, and after it."""
    results = []
    for early in (True, False):
        model = sharded_net(side, build_net(depth=1).requires_grad_(False))
        model.head.requires_grad_(True)
        if not early:
            loss_of(model, 0, side.rank).backward()
            results.append(grads(model))
            model.zero_grad()
        model.requires_grad_(True)
        loss_of(model, 0, side.rank).backward()
        results += [look(model), grads(model)]
    return results


@scenario()
def all_frozen(side):
    model = sharded_net(side, build_net(depth=2).requires_grad_(False))
    return [loss_of(model, 0, side.rank), look(model)]


@scenario()
def applied_while_unsharded(side):
    """`to` and `_apply` reshard first."""
    model = side.fully_shard(linears(4, 3))
    model.unshard()
    model.to(DEVICE.type)
    seen = [look(model)]
    model.unshard()
    model._apply(lambda tensor: tensor * 2)
    return [*seen, values(model)]


@scenario()
def replaced_before_the_first_step(side):
    """A parameter of the module replaced by another DTensor."""
    model = side.fully_shard(linears(4, 3))
    model[0].weight = nn.Parameter(model[0].weight.detach() * 2)
    return [look(model), trained_linears(side, model)]


@scenario()
def data_set_anew_between_steps(side):
    """`param.data` replaced by other tensors."""
    model = side.fully_shard(linears(4, 3))
    first = trained_linears(side, model)
    for param in model.parameters():
        param.data = param.data * 0.5
    return [first, trained_linears(side, model)]


@refusal()
def sharing_across_units(side):
    """torch raises at the first forward; when the error is raised is not compared."""
    model = linears(4, 4, 4)
    model[1].weight = model[0].weight
    side.fully_shard(model[0])
    side.fully_shard(model)(inputs(side))
