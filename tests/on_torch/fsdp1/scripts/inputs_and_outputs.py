"""Containers of inputs and outputs, and the gradients that pass through them."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.on_torch.fsdp1.scripts import scenario
from tests.on_torch.helpers.fsdp1_models import nested, trained
from tests.on_torch.helpers.scripts import grads, inputs


class _Point(NamedTuple):
    x: Tensor
    y: Tensor


@dataclasses.dataclass
class _Pair:
    x: Tensor
    y: Tensor


class _Formed(nn.Module):
    """Two linears; `take` unpacks the inputs, `give` packs the output."""

    def __init__(self, take: Callable[..., Tensor], give: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.take, self.give = take, give
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.give(self.second(self.first(self.take(*args, **kwargs))))


class _Around(nn.Module):
    """Passes inputs and outputs on unchanged."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@scenario("flat")
def inputs_and_outputs_of_any_form(side):
    x = inputs(side)
    forms = {
        "dict": (lambda d: d["a"], lambda y: {"a": y, "b": y * 2}, ({"a": x},), {}),
        "keywords": (lambda a, b=None: a + b, lambda y: [y, y], (x,), {"b": x}),
        "list": (lambda xs: xs[0] + xs[1], lambda y: (y, None, 3), ([x, x],), {}),
        "named": (lambda p: p.x + p.y, lambda y: _Point(y, y), (_Point(x, x),), {}),
        "data class": (lambda p: p.x, lambda y: _Pair(y, y), (_Pair(x, x),), {}),
        "ordered": (lambda d: d["a"], lambda y: collections.OrderedDict(b=y, a=y), (collections.OrderedDict(a=x),), {}),
        "none": (lambda: x, lambda y: y, (), {}),
    }
    results = {}
    low = side.MixedPrecision(torch.bfloat16)
    for name, (take, give, args, kwargs) in forms.items():
        for precision in (None, low):
            module = _Formed(take, give)
            module.second = side.shard(module.second, mixed_precision=precision)
            model = side.shard(_Around(side.shard(module, mixed_precision=precision)), mixed_precision=precision)
            if precision is not None and name == "none":
                continue  # the input is made inside, in full precision
            output = model(*args, **kwargs)
            tensors = _tensors(output)
            torch.stack([t.float().sum() for t in tensors]).sum().backward()
            results[f"{name} {precision is not None}"] = [
                type(output).__name__,
                [t.detach() for t in tensors],
                grads(model),
            ]
    return results


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        return [value.x, value.y]  # type: ignore[attr-defined]
    values = value.values() if isinstance(value, dict) else value
    return [v for v in values if isinstance(v, Tensor)]


@scenario("orig")
def gradients_reach_the_inputs_in_their_dtype(side):
    results = []
    for low in (None, torch.bfloat16):
        model = nested(side, mixed_precision=side.MixedPrecision(low))
        x = inputs(side).requires_grad_()
        model(x).float().square().sum().backward()
        results.append(x.grad)
    return results


@scenario("flat")
def an_output_that_is_left_out_of_the_loss(side):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(4)
            self.a, self.b = side.shard(nn.Linear(4, 4)), side.shard(nn.Linear(4, 4))

        def forward(self, x):
            return self.a(x), self.b(x)

    results = []
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        model = side.shard(Two(), sharding_strategy=side.ShardingStrategy[strategy])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(inputs(side, step))[step % 2].sum().backward()
            optimizer.step()
        results.append(side.full(model))
    return results


@scenario("orig")
def a_module_whose_output_takes_no_gradient(side):
    class Detached(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(4)
            self.a, self.b = side.shard(nn.Linear(4, 4)), side.shard(nn.Linear(4, 4))

        def forward(self, x):
            return self.a(x) + self.b(x).detach()

    model = side.shard(Detached())
    model(inputs(side)).sum().backward()
    return [grads(model), trained(side, model)]
