"""Arguments, outputs in containers, other forward methods, and gradients of inputs."""

import collections
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node

from tests.on_torch.fsdp2.scripts import refusal, scenario
from tests.on_torch.helpers.fsdp2_models import linears, look, trained, trained_linears, values
from tests.on_torch.helpers.models import seed_cpu
from tests.on_torch.helpers.scripts import grads, inputs, raised


class Flattened:
    """A tensor, in a class that is registered with torch's pytree."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


register_pytree_node(Flattened, lambda given: ([given.hidden], None), lambda items, _: Flattened(*items))


class Opened(nn.Module):
    """Takes the tensor out."""

    def forward(self, given):
        """Of `Flattened`, beside something else."""
        return given[0].hidden


@scenario()
def another_forward_method(side):
    class Encoder(nn.Module):
        """Has two methods that use parameters."""

        def __init__(self):
            super().__init__()
            seed_cpu(5)
            self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

        def encode(self, x, *, scale=1.0):
            """A doc of its own."""
            return self.body(x) * scale

        def forward(self, x):
            return self.head(self.body(x))

    model = Encoder()
    side.register_fsdp_forward_method(model, "encode")  # changes nothing: it is not sharded
    side.fully_shard(model)
    side.register_fsdp_forward_method(model, "encode")
    results = []
    for step in range(2):
        (model.encode(inputs(side, step), scale=2.0).sum() + model(inputs(side)).sum()).backward()
        results += [values(model), look(model)]
    model.encode(inputs(side)).sum().backward()
    missing = raised(lambda: side.register_fsdp_forward_method(model, "decode"))
    return [results, grads(model), model.encode.__name__, model.encode.__doc__, missing]


@scenario()
def gradients_of_inputs(side):
    model = linears(4, 4, 4)
    for layer in model:
        side.fully_shard(layer)
    side.fully_shard(model)
    x = inputs(side).requires_grad_()
    model(x).square().sum().backward()
    return [x.grad, values(model)]


@scenario()
def gradients_by_autograd_grad(side):
    """autograd.grad of the inputs alone; parameters get gradients too, and the next step is not affected."""
    model = linears(4, 4, 4)
    for layer in model:
        side.fully_shard(layer)
    side.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = inputs(side).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x)
    return [grad, look(model), trained_linears(side, model, optimizer=optimizer)]


@scenario()
def called_by_name_and_with_nothing(side):
    class Table(nn.Module):
        """Takes no arguments."""

        def __init__(self):
            super().__init__()
            seed_cpu(8)
            self.rows = nn.Parameter(torch.randn(3, 4))

        def forward(self):
            return self.rows.tanh()

    class Named(nn.Module):
        """Takes keyword arguments only."""

        def __init__(self):
            super().__init__()
            self.table, self.linear = side.fully_shard(Table()), side.fully_shard(nn.Linear(4, 2))

        def forward(self, *, x, scale=1.0):
            return self.linear(input=x * self.table()) * scale

    seed_cpu(8)
    model = side.fully_shard(Named())
    return trained(side, model, loss=lambda step: model(x=inputs(side, step), scale=2.0).square().mean())


@scenario()
def outputs_that_are_views(side):
    """torch 2.13 warns about views."""

    class View(nn.Module):
        """Returns a view of its result."""

        def __init__(self):
            super().__init__()
            seed_cpu(8)
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x)[:, 1:]

    model = nn.Sequential(side.fully_shard(View()), nn.Linear(3, 2))
    return trained(side, side.fully_shard(model), loss=lambda step: model(inputs(side, step)).square().mean())


@scenario()
def outputs_in_containers(side):
    @dataclasses.dataclass
    class Output:
        """What a block returns."""

        hidden: Tensor
        extra: list[Tensor]
        note: str

    class Body(nn.Module):
        """Returns and takes tensors in containers."""

        def __init__(self):
            super().__init__()
            seed_cpu(8)
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, given: dict[str, Any], *, more: tuple[Tensor, ...]) -> Output:
            hidden = self.first(given["x"]) + more[0]
            return Output(hidden, [self.second(hidden), hidden.detach()], given["note"])

    class Model(nn.Module):
        """Uses them."""

        def __init__(self):
            super().__init__()
            self.body = side.fully_shard(Body())
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            output = self.body({"x": x, "note": "as is"}, more=(x, x))
            assert output.note == "as is"
            return {"a": self.head(output.extra[0]), "b": (output.hidden, None)}

    model = side.fully_shard(Model())
    results = []
    for use in ("a", "b", "both"):
        output = model(inputs(side))
        loss = (use != "b") * output["a"].sum() + (use != "a") * output["b"][0].square().sum()
        loss.backward()
        results.append(grads(model))
    return results


@scenario()
def outputs_of_classes_that_torch_flattens(side):
    """A class registered with torch's pytree, and one that torch registers."""

    class Body(nn.Module):
        """Returns tensors in such containers."""

        def __init__(self):
            super().__init__()
            seed_cpu(8)
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return Flattened(self.linear(x)), collections.deque([x])

    model = nn.Sequential(side.fully_shard(Body()), Opened(), side.fully_shard(nn.Linear(4, 2)))
    return trained_linears(side, side.fully_shard(model))


@scenario()
def outputs_of_a_subclass_of_dict(side):
    """It keeps its class where outputs are cast."""

    @dataclasses.dataclass
    class Output(collections.OrderedDict):
        """As those of Hugging Face's models."""

        hidden: Tensor

        def __post_init__(self):
            self["hidden"] = self.hidden

    class Body(nn.Module):
        """Returns one."""

        def __init__(self):
            super().__init__()
            seed_cpu(8)
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return Output(self.linear(x))

    policy = side.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = side.fully_shard(Body(), mp_policy=policy)
    output = model(inputs(side))
    output.hidden.sum().backward()
    return [type(output).__name__, output.hidden.detach(), output["hidden"].detach(), grads(model)]


@scenario()
def some_outputs_are_not_used(side):
    class Two(nn.Module):
        """Two heads; a loss uses one of them."""

        def __init__(self):
            super().__init__()
            seed_cpu(8)
            self.heads = nn.ModuleList(side.fully_shard(nn.Linear(4, 3)) for _ in range(2))

        def forward(self, x):
            return [head(x) for head in self.heads]

    model = side.fully_shard(Two())
    results = []
    for i in (0, 1):
        model(inputs(side))[i].sum().backward()
        results.append(grads(model))
    return results


@refusal()
def a_method_that_is_not_there(side):
    side.register_fsdp_forward_method(side.fully_shard(nn.Linear(4, 2)), "encode")
