"""Names, shapes and identity of parameters, and edits of them between steps."""

import copy

import torch
from torch import nn

from tests.on_torch.fsdp1.scripts import scenario
from tests.on_torch.helpers.device import DEVICE
from tests.on_torch.helpers.fsdp1_models import nested, trained
from tests.on_torch.helpers.scripts import grads, inputs, raised


@scenario("orig")
def names_and_shapes_inside_forward(side):
    seen = []

    class Looking(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            seen.append([(n, tuple(p.shape)) for n, p in self.named_parameters()])
            return self.linear(x)

    model = side.shard(nn.Sequential(side.shard(Looking()), nn.Linear(4, 4)))
    model(inputs(side)).sum().backward()
    return seen if side.use_orig_params else []


@scenario(
    differs="torch shows full parameters between forward and backward where they are not freed", differs_with=("orig",)
)
def parameters_after_forward(side):
    """Shapes between forward and backward."""
    results = []
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        model = nested(side, sharding_strategy=side.ShardingStrategy[strategy])
        output = model(inputs(side))
        if side.use_orig_params or strategy == "FULL_SHARD":
            inner = model.module.layers[2]
            results.append([(n, tuple(p.shape)) for n, p in inner.named_parameters()])
        output.sum().backward()
        results.append([(n, tuple(p.shape)) for n, p in model.named_parameters()])
    return results


@scenario()
def frozen_units_beside_trained_ones(side):
    results = []
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        torch.manual_seed(5)
        trunk = nn.Sequential(side.shard(nn.Linear(4, 4).requires_grad_(False)), nn.ReLU())
        head = side.shard(nn.Linear(4, 2))
        model = side.shard(nn.Sequential(trunk, head), sharding_strategy=side.ShardingStrategy[strategy])
        results.append([trained(side, model), [p.requires_grad for p in model.parameters()]])
    return results


@scenario()
def copies_of_parameters_and_of_models(side):
    model = nested(side)
    with side.FullyShardedDataParallel.summon_full_params(model):
        params = copy.deepcopy(list(model.parameters()))
    return [[p.detach() for p in params], [type(p).__name__ for p in params]]


@scenario()
def moved_and_cast_between_steps(side):
    model = nested(side)
    first = trained(side, model)
    model.to(DEVICE)
    model.double()
    return [first, [p.dtype for p in model.parameters()], [b.dtype for b in model.buffers()]]


@scenario()
def requires_grad_is_set_on_the_wrapper(side):
    model = nested(side)
    model.module.layers[1].requires_grad_(False)
    results = trained(side, model)
    model.requires_grad_(True)
    return [results, trained(side, model)]


@scenario("orig")
def data_and_gradients_are_replaced(side):
    """`param.data` or `param.grad` replaced by another tensor."""
    if not side.use_orig_params:
        return []
    results = []
    for what in ("data", "grad", "none", "data between", "wrong grad"):
        torch.manual_seed(12)
        model = side.shard(nn.Linear(4, 2, bias=False))
        weight = model.module.weight
        model(inputs(side)).sum().backward()
        output = model(inputs(side)) if what == "data between" else None
        if what in ("data", "data between"):
            weight.data = weight.data + 1
        elif what == "grad":
            weight.grad = torch.ones_like(weight)
        elif what == "none":
            weight.grad = None
        if what == "wrong grad":
            results.append(raised(lambda w=weight: setattr(w, "grad", torch.zeros(w.numel() + 1))))
        else:
            output = model(inputs(side)) if output is None else output
            output.sum().backward()
            results.append([output.detach(), grads(model), side.full(model)])
    return results


@scenario("orig")
def a_parameter_is_replaced(side):
    """A parameter with a gradient is replaced by one without."""
    if not side.use_orig_params:
        return []
    torch.manual_seed(12)
    model = side.shard(nn.Linear(4, 2, bias=False))
    model(inputs(side)).sum().backward()
    model.module.weight = nn.Parameter(torch.full_like(model.module.weight, 0.25))
    output = model(inputs(side))
    output.sum().backward()
    return [output.detach(), side.full(model), grads(model)]


@scenario("orig")
def data_of_a_wrong_shape_is_refused(side):
    if not side.use_orig_params:
        return []
    model = side.shard(nn.Linear(4, 2, bias=False))
    weight = model.module.weight
    weight.data = torch.zeros(weight.numel() + 1)
    return [raised(lambda: model(inputs(side)))]


@scenario()
def summoned_between_forwards(side):
    results = []
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        model = nested(side, sharding_strategy=side.ShardingStrategy[strategy])
        first = model(inputs(side)).square().sum()
        with side.FullyShardedDataParallel.summon_full_params(model):
            results.append([tuple(p.shape) for p in model.parameters()])
        second = model(inputs(side, 1)).square().sum()
        with side.FullyShardedDataParallel.summon_full_params(model, writeback=False):
            pass
        (first + second).backward()
        results += [grads(model), trained(side, model)]
    return results


@scenario()
def tied_weights_below_the_root(side):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(14)
            self.embedding = nn.Embedding(5, 4)
            self.middle = side.shard(nn.Linear(4, 4))
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x):
            return self.head(self.middle(self.embedding(x.argmax(-1).clamp(max=4))))

    model = side.shard(Tied())
    return [trained(side, model), [name for name, _ in model.named_parameters(remove_duplicate=False)]]
