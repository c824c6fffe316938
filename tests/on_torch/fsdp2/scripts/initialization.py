"""Parameters on meta, and the ways to make them real."""

# pyright: reportAttributeAccessIssue=false

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.on_torch.fsdp2.scripts import refusal, scenario
from tests.on_torch.helpers.device import DEVICE
from tests.on_torch.helpers.fsdp2_models import linears, look, sharded_net, trained, trained_linears
from tests.on_torch.helpers.models import Net, build_net, loss_of, seed_cpu
from tests.on_torch.helpers.scripts import Side, inputs, raised


def _meta_net(side: Side) -> Any:
    with torch.device("meta"):
        model = Net(depth=1)
    return sharded_net(side, model)


@scenario()
def from_meta_by_reset_parameters(side):
    model = _meta_net(side)
    seen = [look(model), [param.device.type for param in model.parameters()]]
    early = raised(lambda: loss_of(model, 0, side.rank))
    model = _meta_net(side)
    model.to_empty(device=DEVICE.type)
    seed_cpu(12 + side.rank)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    model.scale.fill_(2.0)
    return [seen, early, [p.device.type for p in model.parameters()], trained(side, model)]


@scenario()
def from_meta_by_values(side):
    model = _meta_net(side)
    model.to_empty(device=DEVICE.type)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(distribute_tensor(torch.linspace(-1, 1, param.numel()).view(param.shape), param.device_mesh))
        model.scale.fill_(2.0)
    return trained(side, model)


def _real(param: Any, value: float) -> nn.Parameter:
    """A parameter on the CPU with the sharding of one on meta."""
    full = torch.linspace(-1, value, param.numel()).view(param.shape)
    return nn.Parameter(distribute_tensor(full, param.device_mesh, param.placements))


@scenario()
def from_meta_by_new_parameters(side):
    """`to_empty` moves some parameters; others are replaced by parameters on the CPU, which an optimizer holds."""
    with torch.device("meta"):
        model = linears(4, 6, 5)
    side.fully_shard(model[0])
    side.fully_shard(model)
    model[0].to_empty(device=DEVICE.type)
    with torch.no_grad():
        for param in model[0].parameters():
            param.fill_(0.5)
    model[1].weight, model[1].bias = _real(model[1].weight, 1), _real(model[1].bias, 2)
    held = list(model.parameters())
    results = trained_linears(side, model)
    return [results, [a is b for a, b in zip(held, model.parameters(), strict=True)]]


@scenario()
def from_meta_partly_by_new_parameters(side):
    with torch.device("meta"):
        model = linears(4, 6)
    side.fully_shard(model)
    model[0].weight = _real(model[0].weight, 1)
    model.to_empty(device=DEVICE.type)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
    return trained_linears(side, model)


@scenario()
def parameters_on_meta_take_no_memory(side):
    with torch.device("meta"):
        model = nn.Linear(2**20, 2**20, bias=False)
    side.fully_shard(model)
    return [look(model), model.weight.device, model.weight.to_local().device]


@scenario()
def from_meta_by_assignment(side):
    """load_state_dict(assign=True) with DTensors that the script distributed."""
    model = _meta_net(side)
    full = build_net(depth=1).state_dict()
    sharded = {
        name: distribute_tensor(full[name], own.device_mesh, own.placements) if isinstance(own, DTensor) else full[name]
        for name, own in model.state_dict().items()
    }
    result = model.load_state_dict(sharded, assign=True)
    return [list(result), [type(p).__name__ for p in model.parameters()], look(model), trained(side, model)]


@scenario()
def from_meta_by_assignment_to_a_list(side):
    """A unit of several modules is loaded one module at a time, and so may be a model."""
    with torch.device("meta"):
        model = linears(4, 6, 5)
    side.fully_shard([model[0], model[1]])
    side.fully_shard(model)
    given = {name: _real(own, i) for i, (name, own) in enumerate(model.state_dict().items())}
    at_once = [list(model.load_state_dict(given, assign=True)), trained_linears(side, model)]
    with torch.device("meta"):
        model = linears(4, 6, 5)
    side.fully_shard(model)
    for part in ("0.", "1."):
        own = {name: value for name, value in given.items() if name.startswith(part)}
        model.load_state_dict(own, assign=True, strict=False)
    return [at_once, trained_linears(side, model)]


@refusal()
def a_forward_on_meta(side):
    with torch.device("meta"):
        model = nn.Linear(4, 2)
    side.fully_shard(model)(inputs(side))
