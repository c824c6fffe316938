"""Modules of torch.nn that hold parameters in different ways."""

from typing import Any

import torch
from torch import nn

from tests.on_torch.fsdp1.scripts import scenario
from tests.on_torch.helpers.device import DEVICE
from tests.on_torch.helpers.fsdp1_models import sgd, trained
from tests.on_torch.helpers.scripts import inputs


@scenario()
def more_ranks_than_elements(side):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((1,), 2.0))

        def forward(self, x):
            return x * self.weight

    return trained(side, side.shard(nn.Sequential(side.shard(Scale()), nn.Linear(4, 1, bias=False))))


@scenario("orig")
def modules_of_all_kinds(side):
    """Modules that hold parameters in lists, dicts, parametrizations and flat weights."""

    class Lists(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = nn.ParameterList([torch.ones(4), torch.full((4,), 2.0)])
            self.named = nn.ParameterDict({"b": torch.ones(4), "a": torch.zeros(4)})

        def forward(self, x):
            return sum(x * row for row in self.rows) + self.named["a"] + self.named["b"] * len(self.rows)

    class First(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)[0]

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x):
            return self.inner(x, x, x, need_weights=False)[0]

    results = {}
    for name, make in {
        "lists": Lists,
        "lstm": lambda: First(nn.LSTM(4, 3, num_layers=2, batch_first=True)),
        "gru": lambda: First(nn.GRU(4, 3, batch_first=True)),
        "attention": Attention,
        "encoder": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True),
        "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
        "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
    }.items():
        torch.manual_seed(10)
        model = side.shard(nn.Sequential(nn.Linear(4, 4), side.shard(make())))
        optimizer = sgd(model)
        for step in range(2):
            optimizer.zero_grad()
            model(inputs(side, step).view(1, 3, 4)).square().sum().backward()
            optimizer.step()
        with torch.no_grad():
            results[name] = [side.full(model), model.eval()(inputs(side).view(1, 3, 4))]
    return results


@scenario(differs="torch keeps strides, and flattens in the order of memory")
def channels_last(side):
    torch.manual_seed(11)
    module: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 2))
    module = module.to(memory_format=torch.channels_last)
    model = side.shard(module)
    optimizer = sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        x = torch.randn(2, 3, 6, 6, generator=torch.Generator(DEVICE).manual_seed(step + side.rank))
        model(x.to(memory_format=torch.channels_last)).square().sum().backward()
        optimizer.step()
    pieces = [p.detach().clone() for p in model.parameters()]
    with side.FullyShardedDataParallel.summon_full_params(model):
        strides = [p.stride() for p in model.parameters()]
    return [side.full(model), strides, pieces]


@scenario("orig")
def a_batch_norm_in_training_and_evaluation(side):
    torch.manual_seed(13)
    model = side.shard(nn.Sequential(nn.Linear(4, 4), side.shard(nn.BatchNorm1d(4))))
    results = trained(side, model)
    model.eval()
    return [results, dict(model.named_buffers()), model(inputs(side)).detach()]
