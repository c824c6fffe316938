"""What `fully_shard` returns, units within units, ignored parameters, and what it rejects."""

import copy
import math

import torch
from torch import nn

from tests.on_torch.fsdp2.scripts import refusal, scenario
from tests.on_torch.helpers.fsdp2_models import linears, look, sharded_net, trained, trained_linears, values
from tests.on_torch.helpers.models import build_net, seed_cpu
from tests.on_torch.helpers.scripts import inputs


@scenario()
def classes(side):
    class Custom(nn.Linear):
        """A kind of linear."""

    modules = [nn.Linear(4, 2), nn.Linear(4, 2), Custom(4, 2), nn.Sequential(nn.Linear(4, 2)), nn.ReLU()]
    models = [side.fully_shard(module) for module in modules]
    return [
        [a is b for a, b in zip(models, modules, strict=True)],
        [[cls.__name__ for cls in type(model).__mro__] for model in models],
        [isinstance(model, side.FSDPModule) for model in models],
        [isinstance(model, nn.Linear) for model in models],
        type(models[0]) is type(models[1]),
        [repr(model) for model in models],
    ]


@scenario()
def containers_are_indexed(side):
    """A part of a sharded container is a plain container."""

    class Layers(nn.ModuleList):
        """A container that can be called."""

        def forward(self, x):
            for layer in self:
                x = layer(x)
            return x

    sequential, layers = side.fully_shard(linears(4, 3, 5, 2)), side.fully_shard(Layers(linears(4, 3, 2)))
    part, made = sequential[:2], type(sequential)(nn.Linear(2, 2))
    return [
        [type(part).__name__, len(part), part[0] is sequential[0], isinstance(part, side.FSDPModule)],
        [type(made).__name__, isinstance(made, side.FSDPModule)],
        [type(layers[1:]).__name__, len(layers), type(layers[0]).__name__],
        sequential(inputs(side)).detach(),
        layers(inputs(side)).detach(),
    ]


@scenario(num_ranks=4)
def uneven_parameters(side):
    """Fewer rows than ranks, one row, no elements, more dims."""
    module = nn.ParameterDict(
        {
            str(shape): nn.Parameter(torch.arange(math.prod(shape), dtype=torch.float32).view(shape))
            for shape in ((5, 3), (2, 3), (1,), (8, 2), (6, 1, 2, 2), (0, 3))
        }
    )
    model = side.fully_shard(module)
    model.unshard()
    full = {name: param.detach().clone() for name, param in model.named_parameters()}
    model.reshard()
    return [values(model), full, {name: param.full_tensor().detach() for name, param in model.named_parameters()}]


@scenario()
def names_and_order(side):
    model = sharded_net(side, build_net(depth=2, tied=True))
    return [
        [name for name, _ in model.named_parameters()],
        [name for name, _ in model.named_parameters(remove_duplicate=False)],
        [name for name, _ in model.named_buffers()],
        [[name, type(module).__name__] for name, module in model.named_modules()],
        list(model.state_dict()),
        model.head.weight is model.embedding.weight,
        sum(p.numel() for p in model.parameters()),
    ]


@scenario()
def parameters_keep_their_identity(side):
    """Steps replace no parameter object, so an optimizer keeps stepping those that it holds."""
    model = sharded_net(side)
    before = list(model.parameters())
    results = trained(side, model)
    after = list(model.parameters())
    return [[a is b for a, b in zip(before, after, strict=True)], results]


@scenario()
def a_module_without_parameters(side):
    model = nn.Sequential(nn.Linear(4, 4), side.fully_shard(nn.ReLU()), nn.Linear(4, 2))
    return trained_linears(side, side.fully_shard(model))


@scenario()
def ignored_parameters(side):
    model = linears(4, 3, 5)
    left = {model[0].weight, model[1].bias}
    side.fully_shard(model[1], ignored_params=left)
    side.fully_shard(model, ignored_params=left)
    return [look(model), trained_linears(side, model), look(model)]


@scenario()
def units_on_three_levels(side):
    seed_cpu(6)
    inner = [side.fully_shard(nn.Linear(4, 4)) for _ in range(2)]
    middle = side.fully_shard(nn.Sequential(inner[0], nn.Linear(4, 5)))
    model = side.fully_shard(nn.Sequential(nn.Linear(4, 4), middle, nn.Linear(5, 4), inner[1]))
    return trained_linears(side, model)


@scenario()
def a_root_without_parameters(side):
    seed_cpu(6)
    model = nn.Sequential(*(side.fully_shard(nn.Linear(4, 4)) for _ in range(3)))
    return trained_linears(side, side.fully_shard(model))


@scenario()
def a_root_that_is_not_sharded(side):
    """Each unit is a root of its own."""
    seed_cpu(6)
    model = nn.Sequential(*(side.fully_shard(nn.Linear(4, 4)) for _ in range(3)))
    return [trained_linears(side, model), look(model)]


@refusal()
def containers_without_forward(side):
    side.fully_shard(nn.ModuleList([nn.Linear(2, 2)]))


@refusal()
def dicts_without_forward(side):
    side.fully_shard(nn.ModuleDict({"a": nn.Linear(2, 2)}))


@refusal()
def scalar_parameters(side):
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.tensor(1.0))
    side.fully_shard(model)


@refusal()
def sharding_twice(side):
    model = side.fully_shard(nn.Linear(4, 2))
    side.fully_shard(model)


@refusal()
def copying(side):
    copy.deepcopy(side.fully_shard(nn.Linear(4, 2)))


@refusal()
def a_root_after_its_parts(side):
    model = linears(4, 3, 2)
    side.fully_shard(model[0])(inputs(side))
    side.fully_shard(model)(inputs(side))
