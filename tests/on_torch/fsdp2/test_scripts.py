"""What scripts do around fully_shard: each thing done with torch.distributed.fsdp and with torch_backend in the same ranks, and
what comes of it compared (see tests/on_torch/helpers/scripts.py).

Models have sizes that no world size divides, so that shards are uneven and padded.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOptionalMemberAccess=false, reportPrivateImportUsage=false, reportReturnType=false

import contextlib
import copy
import dataclasses
import functools
import io
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as checkpoint_state
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as checkpoint_by_hooks
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from tests.conftest import EXHAUSTIVE
from tests.on_torch.helpers.fully_sharded import (
    PACKAGES,
    Both,
    asked,
    given,
    grads,
    hybrid_mesh,
    inputs,
    linears,
    mesh_of,
    parallel,
    sharded_net,
    trained,
    values,
)
from tests.on_torch.helpers.models import Net, build_net, loss_of, seed_cpu
from tests.on_torch.helpers.models import batch as token_batch
from tests.on_torch.helpers.scripts import Side, compare, raised

EVERY = bool(os.environ.get(EXHAUSTIVE))


class Scenario(NamedTuple):
    """A script, how many ranks run it, and whether this torch has what it uses."""

    fn: Callable[[Side], Any]
    num_ranks: int
    there: bool


SCENARIOS: dict[str, Scenario] = {}


def scenario(num_ranks: int = 2, needs: str = "", name: str = "") -> Callable[[Callable], Callable]:
    """Register a scenario; `needs` names a method that older versions of torch lack."""

    def register(fn: Callable[[Side], Any]) -> Callable[[Side], Any]:
        there = not needs or any(
            hasattr(where, needs) for where in (torch.distributed.fsdp.FSDPModule, torch.distributed.fsdp)
        )
        SCENARIOS[name or fn.__name__] = Scenario(fn, num_ranks, there)
        return fn

    return register


# Models, and what is looked at


def look(module: nn.Module) -> dict[str, Any]:
    """How each registered parameter appears, but for its values."""
    return {
        name: [
            type(param).__name__,
            tuple(param.shape),
            param.stride(),
            param.dtype,
            param.requires_grad,
            [repr(placement) for placement in param.placements] if isinstance(param, DTensor) else None,
        ]
        for name, param in module.named_parameters()
    }


def trained_linears(side: Side, model: nn.Module, steps: int = 2, **options: Any) -> list[Any]:
    """As `trained`, of a model of linears."""
    width = next(model.parameters()).shape[1]
    return trained(
        side, model, steps, loss=lambda step: model(inputs(side, step, width)).float().square().mean(), **options
    )


# What fully_shard returns


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


def _gradients_of_gradients(side: Side, **options: Any) -> list[Any]:
    model = linears(4, 5, 3)
    for part in (model[0], model):
        side.fully_shard(part, **options)
    for step in range(2):
        model(inputs(side, step)).square().sum().backward(create_graph=True)
    return values(model)


@scenario()
def backward_that_creates_a_graph(side):
    """The gradients of sharded parameters have none."""
    return _gradients_of_gradients(side)


@scenario()
def backward_that_creates_a_graph_over_a_flat_layout(side):
    if side.name == "torch_backend":
        made = _gradients_of_gradients(side, layout="flat")
        per_param = _gradients_of_gradients(side)
        assert not any(grad.requires_grad for _, grad in made.values())
        for name, (_, grad) in per_param.items():
            assert torch.equal(made[name][1].full_tensor(), grad.full_tensor())
        return per_param
    return _gradients_of_gradients(side)


@scenario()
def attributes_after_a_backward_that_keeps_parameters(side):
    model = side.fully_shard(linears(4, 5, 3), reshard_after_forward=True)
    model.set_reshard_after_backward(False)
    model(inputs(side)).square().sum().backward()
    return [
        model[0].weight is model[0]._parameters["weight"],
        model[0].weight.is_leaf,
        model[0].weight.detach().clone(),
    ]


@scenario()
def parameters_keep_their_identity(side):
    """Those that an optimizer was made with are those that it steps."""
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
def batch_norm_and_its_buffers(side):
    seed_cpu(4)
    model = nn.Sequential(nn.Linear(4, 5), side.fully_shard(nn.BatchNorm1d(5)))
    side.fully_shard(model)
    results = trained_linears(side, model)
    model.eval()
    return [results, {name: buffer.clone() for name, buffer in model.named_buffers()}, model(inputs(side)).detach()]


# What is registered when


def _seen_in_a_step(side: Side, reshard: bool | int | None) -> list[Any]:
    """How parameters of the root and of a block appear at each moment of a step."""
    seen = []
    model = build_net(depth=2, width=8)

    def see(*_: Any) -> None:
        seen.append([look(model.head), look(model.blocks[0])])

    def see_now_and_in_backward(module: nn.Module, args: Any, output: Tensor) -> None:
        see()
        output.register_hook(see)

    model.blocks[0].norm.register_forward_hook(see_now_and_in_backward)
    options = {} if reshard is None else {"reshard_after_forward": reshard}
    sharded_net(side, model, **options)
    see()
    for step in range(2):
        loss = loss_of(model, step, side.rank)
        see()
        loss.backward()
        see()
    return seen


for _reshard in (None, True, False):
    scenario(name=f"registered_in_a_step_{_reshard}")(functools.partial(_seen_in_a_step, reshard=_reshard))


@scenario(num_ranks=4)
def registered_in_a_step_2(side):
    """Half of each parameter between forward and backward. The head's rows are not divided by 2: their values are R08's."""
    return _seen_in_a_step(side, 2)


@scenario(num_ranks=4)
def resharded_to_fewer_ranks(side):
    """Between forward and backward, where all sizes divide."""
    seed_cpu(2)
    model = nn.Sequential(*(side.fully_shard(nn.Linear(8, 8), reshard_after_forward=2) for _ in range(2)))
    side.fully_shard(model, reshard_after_forward=2)
    loss = model(inputs(side, width=8)).square().sum()
    between = values(model)
    full = [param.full_tensor().detach() for param in model.parameters()]
    loss.backward()
    return [between, full, values(model), trained_linears(side, model)]


@scenario(num_ranks=4)
def resharded_to_fewer_ranks_and_back_by_hand(side):
    seed_cpu(2)
    model = side.fully_shard(nn.Linear(8, 8), reshard_after_forward=2)
    loss = model(inputs(side, width=8)).square().sum()
    seen = [look(model)]
    model.reshard()
    seen.append(look(model))
    loss.backward()
    return [seen, values(model)]


@scenario(num_ranks=4)
def resharding_to_all_ranks_or_to_one(side):
    """A number of ranks that says no more than True or False."""
    results = []
    for number in (1, 4):
        model = side.fully_shard(linears(8, 5), reshard_after_forward=number)
        model(inputs(side, width=8)).sum().backward()
        model(inputs(side, width=8))
        results += [look(model), values(model)]
        model.reshard()
    return results


@scenario()
def resharding_is_changed_between_steps(side):
    model = sharded_net(side)
    results = []
    for reshard, recurse in ((True, True), (False, True), (True, False), (False, False)):
        model.set_reshard_after_forward(reshard, recurse=recurse)
        loss = loss_of(model, 0, side.rank)
        results.append(look(model))
        loss.backward()
        results += [look(model), grads(model)]
    return results


@scenario()
def not_resharded_after_backward(side):
    model = sharded_net(side)
    results = []
    for reshard, recurse in ((False, True), (False, False), (True, True)):
        model.set_reshard_after_backward(reshard, recurse=recurse)
        loss_of(model, 0, side.rank).backward()
        results += [look(model)]
        for module in model.modules():
            if isinstance(module, side.FSDPModule):
                module.reshard()
        results += [values(model)]
    return results


@scenario()
def hooks_of_the_user_see_parameters(side):
    """Those registered before and after fully_shard, in forward and backward."""
    events = []

    def note(name):
        def hook(module, *_):
            events.append([name, type(module.weight).__name__])

        return hook

    def register(module, when):
        module.register_forward_pre_hook(note(f"pre forward, {when}"))
        module.register_forward_hook(note(f"forward, {when}"))
        module.register_full_backward_pre_hook(note(f"pre backward, {when}"))
        module.register_full_backward_hook(note(f"backward, {when}"))

    model = linears(4, 3, 2)
    for layer in model:
        register(layer, "before")
        side.fully_shard(layer)
        register(layer, "after")
    side.fully_shard(model)
    x = inputs(side).requires_grad_()
    for _ in range(2):
        model(x).sum().backward()
    return [events, x.grad]


# By hand


@scenario()
def unshard_and_reshard(side):
    model = sharded_net(side)
    seen = [model.unshard(), look(model), model.reshard(), look(model)]
    handle = model.blocks[0].unshard(async_op=True)
    seen += [isinstance(handle, side.UnshardHandle), handle.wait(), look(model), handle.wait()]
    model.blocks[0].unshard()
    seen += [model.unshard(async_op=False), look(model)]
    seen += [trained(side, model), look(model)]
    model.reshard()
    model.reshard()
    return [*seen, look(model)]


@scenario()
def unsharded_ahead_of_forward(side):
    model = sharded_net(side)
    handles = [module.unshard(async_op=True) for module in (model, *model.blocks)]
    loss = loss_of(model, 0, side.rank)
    loss.backward()
    return [len(handles), loss.detach(), values(model)]


@scenario()
def unsharded_in_low_precision(side):
    model = side.fully_shard(linears(4, 3), mp_policy=side.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model.unshard()
    full = {name: param.detach().clone() for name, param in model.named_parameters()}
    model.reshard()
    return [full, trained_linears(side, model)]


@scenario()
def edits_of_what_is_unsharded_are_lost(side):
    model = side.fully_shard(linears(4, 3))
    model.unshard()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(3)
    model.reshard()
    return values(model)


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


# Training


for _reshard in (None, True, False):

    def _trains(side: Side, reshard: bool | None) -> Any:
        model = sharded_net(side, **({} if reshard is None else {"reshard_after_forward": reshard}))
        return trained(side, model, steps=3, optimizer=torch.optim.AdamW(model.parameters(), lr=0.05))

    scenario(name=f"trains_{_reshard}")(functools.partial(_trains, reshard=_reshard))


@scenario()
def trains_on_one_rank_of_each_group(side):
    """A mesh whose groups have one rank: nothing to gather, nothing to average."""
    mesh = mesh_of((2, 1), ("rest", "one"))["one"]
    return trained(side, sharded_net(side, mesh=mesh))


@scenario()
def a_mesh_of_a_group(side):
    """And one that lists the ranks the other way round."""
    group = dist.new_group([0, 1])
    results = []
    for mesh in (DeviceMesh.from_group(group, "cpu"), DeviceMesh("cpu", [1, 0])):
        model = sharded_net(side, mesh=mesh)
        results += [trained(side, model), [param.full_tensor().detach() for param in model.parameters()]]
    return results


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


@scenario()
def an_inner_unit_alone_later(side):
    model = sharded_net(side)
    first = trained(side, model)
    model.blocks[1](inputs(side, width=7)).square().sum().backward()
    return [first, grads(model), trained(side, model)]


@scenario()
def used_twice_in_a_forward(side):
    seed_cpu(7)
    layers = [side.fully_shard(nn.Linear(4, 4)) for _ in range(2)]

    class Twice(nn.Module):
        """Goes through its layers twice."""

        def __init__(self):
            super().__init__()
            self.layers, self.scale = nn.ModuleList(layers), nn.Parameter(torch.ones(3))

        def forward(self, x):
            for layer in (*self.layers, *self.layers):
                x = torch.tanh(layer(x)) * self.scale.sum()
            return x

    model = side.fully_shard(Twice())
    loss = lambda step: model(inputs(side, step)).square().mean()  # noqa: E731
    return trained(side, model, steps=3, loss=loss)


@scenario()
def two_forwards_one_backward(side):
    model = sharded_net(side)
    results = []
    for step in range(2):
        (loss_of(model, step, side.rank) + loss_of(model, step + 1, side.rank)).backward()
        results.append(grads(model))
    return results


@scenario()
def two_forwards_two_backwards(side):
    model = sharded_net(side)
    first, second = loss_of(model, 0, side.rank), loss_of(model, 1, side.rank)
    second.backward()
    first.backward()
    return [values(model), trained(side, model)]


@scenario()
def without_gradients_and_then_with(side):
    """A forward under no_grad and in evaluation before a training."""
    results = []
    for context, reshard in ((torch.no_grad, True), (contextlib.nullcontext, False), (torch.no_grad, None)):
        model = sharded_net(side, **({} if reshard is None else {"reshard_after_forward": reshard}))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # what is not resharded shows full parameters
        model.eval()
        with context():
            results.append(loss_of(model, 0, side.rank).detach().clone())
        results.append(look(model))
        model.train()
        results.append(trained(side, model, optimizer=optimizer))
    return results


@scenario()
def inference_mode(side):
    """A training after it is not to be had from torch; see test_fully_shard.py."""
    model = sharded_net(side)
    with torch.inference_mode():
        return [[loss_of(model, step, side.rank).clone() for step in range(2)], look(model)]


@scenario()
def a_forward_that_no_backward_follows(side):
    model = sharded_net(side)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, 5, side.rank)
    first = trained(side, model, optimizer=optimizer)
    loss_of(model, 6, side.rank)
    return [first, trained(side, model, optimizer=optimizer)]


@scenario()
def evaluation_after_an_edit(side):
    """What a root keeps unsharded after a forward without gradients; what it shows after a step."""
    model = sharded_net(side)
    with torch.no_grad():
        before = loss_of(model, 0, side.rank)
    results = trained(side, model)
    with torch.no_grad():
        after = loss_of(model, 0, side.rank)
    return [before, results, after]


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
    """Of the inputs alone: parameters get theirs as well, and the next step is as usual."""
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
        """Takes nothing."""

        def __init__(self):
            super().__init__()
            seed_cpu(8)
            self.rows = nn.Parameter(torch.randn(3, 4))

        def forward(self):
            return self.rows.tanh()

    class Named(nn.Module):
        """Takes all by name."""

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
    """torch 2.13 warns of them."""

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
def microbatches_of_a_pipeline(side):
    """All forwards, and then all backwards, of which the last reduces."""
    model = sharded_net(side, reshard_after_forward=False)
    results = []
    for step in range(2):
        model.set_is_last_backward(False)
        model.set_requires_gradient_sync(False)
        losses = [loss_of(model, 3 * step + micro, side.rank) for micro in range(3)]
        for micro, loss in enumerate(losses):
            if micro == 2:
                model.set_is_last_backward(True)
                model.set_requires_gradient_sync(True)
            loss.backward()
        results.append(grads(model))
        model.zero_grad()
    return results


@scenario()
def microbatches_of_a_pipeline_reduced_each(side):
    model = sharded_net(side)
    results = []
    for step in range(2):
        losses = [loss_of(model, 2 * step + micro, side.rank) for micro in range(2)]
        for micro, loss in enumerate(losses):
            model.set_is_last_backward(micro == 1)
            loss.backward()
        results.append(grads(model))
    return results


@scenario()
def some_outputs_are_not_used(side):
    class Two(nn.Module):
        """Two heads, of which a loss uses one."""

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


@scenario()
def unused_parameters(side):
    """The same on every rank: without a gradient there."""
    model = build_net(depth=2)
    model.spare = nn.Linear(3, 2)
    model.blocks[1].spare = nn.Parameter(torch.ones(3))
    return trained(side, sharded_net(side, model))


@scenario(needs="set_reduce_scatter_unused_params")
def unused_parameters_are_reduced(side):
    """One rank does without what the other uses: zeros count there, if asked for."""

    class Choice(nn.Module):
        """Uses the part that it is told to."""

        def __init__(self):
            super().__init__()
            seed_cpu(9)
            self.parts = nn.ModuleDict({name: nn.Linear(4, 3) for name in ("a", "b", "never")})

        def forward(self, x, name):
            return self.parts[name](x)

    results = []
    for recurse in (True, False):
        model = side.fully_shard(Choice())
        model.set_reduce_scatter_unused_params(True, recurse=recurse)
        for name in ("ab"[side.rank], "a"):
            model(inputs(side), name).sum().backward()
            results.append(grads(model))
    return results


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
def shared_parameters_in_a_list(side):
    """Tied across modules that are one unit."""
    model = build_net(depth=1, tied=True)
    side.fully_shard([model.embedding, model.head])
    results = trained(side, side.fully_shard(model))
    return [results, model.head.weight is model.embedding.weight, look(model)]


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
    """Before the first step, and after it."""
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
def zero_grad_either_way(side):
    model = sharded_net(side)
    results = []
    for to_none in (False, True, False):
        loss_of(model, 0, side.rank).backward()
        results.append(grads(model))
        model.zero_grad(set_to_none=to_none)
        results.append(grads(model))
    return results


# Accumulation


def _accumulated(side: Side, reduce: str, reshard: bool, last: bool, low: bool) -> Any:
    """Three microbatches, of which the last is reduced: with which calls, and what stands in the gradients after each."""
    policy = side.MixedPrecisionPolicy(torch.bfloat16, torch.float32) if low else side.MixedPrecisionPolicy()
    model = sharded_net(side, mp_policy=policy)
    results = []
    for step in range(2):
        for micro in range(3):
            if reduce == "all":
                model.set_requires_gradient_sync(micro == 2)
            elif reduce == "root":
                model.set_requires_gradient_sync(micro == 2, recurse=False)
            elif reduce == "blocks":
                for block in model.blocks:
                    block.set_requires_gradient_sync(micro == 2)
            if last:
                model.set_is_last_backward(micro == 2)
            if not reshard:
                model.set_reshard_after_backward(micro == 2)
            loss = loss_of(model, 3 * step + micro, side.rank)
            loss.backward()
            # Without resharding torch shows the gradients that wait to be reduced.
            results += [loss.detach(), grads(model) if reshard or micro == 2 else None]
        model.zero_grad()
    return results


# Every way to reduce, and every way to reshard in turn.
_WAYS_TO_RESHARD = ((True, False, False), (False, True, False), (True, True, True))
for _i, _reduce in enumerate(("always", "all", "root", "blocks")):
    for _reshard_after, _last, _low in _WAYS_TO_RESHARD if EVERY else (_WAYS_TO_RESHARD[_i % 3],):
        _name = f"accumulates_{_reduce}" + "_resharded" * _reshard_after + "_last" * _last + "_low" * _low
        scenario(name=_name)(
            functools.partial(_accumulated, reduce=_reduce, reshard=_reshard_after, last=_last, low=_low)
        )


@scenario(num_ranks=4)
def accumulates_before_the_all_reduce(side):
    """Reduce-scatter each time, all-reduce the last time; and neither."""
    model = sharded_net(side, mesh=hybrid_mesh())
    results = []
    for step in range(2):
        for micro in range(3):
            model.set_requires_all_reduce(micro == 2)
            if step:
                model.set_requires_gradient_sync(micro != 0)
                model.set_requires_all_reduce(micro == 2)
            loss_of(model, 3 * step + micro, side.rank).backward()
            results.append(grads(model))
        model.zero_grad()
    model.set_requires_all_reduce(False)
    model.set_requires_gradient_sync(True)  # means both
    loss_of(model, 6, side.rank).backward()
    return [*results, grads(model)]


# Optimizers


for _options in ({"foreach": True}, {"foreach": False}, {"fused": True}):
    for _kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam):

        def _optimized(side: Side, kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> Any:
            model = sharded_net(side)
            optimizer = kind(model.parameters(), lr=0.05, **options)  # type: ignore[call-arg]
            return [trained(side, model, optimizer=optimizer), list(optimizer.state_dict()["state"].values())]

        # A DTensor has no fused SGD; foreach=False is what both have by default.
        if (
            _kind is (torch.optim.Adam if "fused" in _options else _kind)
            and (_kind is not torch.optim.Adam or "fused" in _options)
            and (EVERY or _options != {"foreach": False})
        ):
            scenario(name=f"optimizer_{_kind.__name__}_{'_'.join(f'{k}_{v}' for k, v in _options.items())}")(
                functools.partial(_optimized, kind=_kind, options=_options)
            )


@scenario()
def an_optimizer_in_backward(side):
    """Hooks after accumulation step each parameter and let go of its gradient."""
    model = sharded_net(side)
    optimizers = {param: torch.optim.Adam([param], lr=0.05) for param in model.parameters()}
    seen = []

    def step(param):
        seen.append([tuple(param.shape), param.grad is not None])
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    for i in range(2):
        loss_of(model, i, side.rank).backward()
    return [seen, values(model)]


@scenario()
def hooks_on_parameters(side):
    """Those of tensors are not called for shards; those after accumulation are, in an order."""
    model, seen = sharded_net(side), []
    for name, param in model.named_parameters():
        param.register_hook(lambda grad, name=name: seen.append(["gradient", name]))
        param.register_post_accumulate_grad_hook(lambda param, name=name: seen.append(["accumulated", name]))
    return [trained(side, model), seen]


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
    """Of parameters with and without one, and the norm by itself."""
    model = build_net(depth=2)
    model.spare = nn.Linear(3, 2)
    sharded_net(side, model)
    loss_of(model, 0, side.rank).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None], 3.0)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.02, norm)
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    return [norm.full_tensor(), values(model)]


@scenario()
def scaled_gradients(side):
    """torch.amp.GradScaler, with a step that overflows on one rank."""
    model = side.fully_shard(linears(4, 3, 2))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales = []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(inputs(side, step)).square().mean()
        if step == 1 and side.rank == 1:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        if step == 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [scales, values(model)]


# Lists of modules


class Heads(nn.Module):
    """A body, and a norm and a head that are grouped."""

    def __init__(self) -> None:
        super().__init__()
        seed_cpu(10)
        self.embedding, self.body = nn.Linear(4, 5), nn.Linear(5, 5)
        self.norm, self.head = nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, x: Tensor, chunks: bool = False) -> Tensor:
        hidden = self.norm(torch.tanh(self.body(self.embedding(x))))
        return hidden if chunks else self.head(hidden)


def grouped(side: Side, **options: Any) -> Heads:
    """With two units of several modules."""
    model = Heads()
    side.fully_shard([model.embedding, model.body], **options)
    side.fully_shard([model.norm, model.head], **options)
    return side.fully_shard(model, **options)


@scenario()
def a_list_of_modules(side):
    model = Heads()
    modules = [model.norm, model.head]
    returned = side.fully_shard(modules)
    side.fully_shard(model)
    return [
        type(returned).__name__,
        [a is b for a, b in zip(returned, modules, strict=True)],
        [type(module).__name__ for module in model.modules()],
        look(model),
        trained_linears_of(side, model),
        [model.norm.unshard(), look(model), model.head.reshard(), look(model)],
    ]


def trained_linears_of(side: Side, model: nn.Module, steps: int = 2) -> list[Any]:
    """As `trained`, of a model that takes four features."""
    return trained(side, model, steps, loss=lambda step: model(inputs(side, step)).float().square().mean())


@scenario()
def grouped_modules_train(side):
    results = []
    for reshard in (True, False):
        model = grouped(side, reshard_after_forward=reshard)
        results += [trained_linears_of(side, model, 3), look(model)]
    return results


@scenario(needs="reset_iter_state")  # of the same version
def a_forward_of_a_part_of_a_list(side):
    """The head is not used by this forward, nor by its backward."""
    model = grouped(side)
    results = []
    for step in range(2):
        model(inputs(side, step), chunks=True).square().sum().backward()
        results += [look(model), grads(model)]
    return [results, trained_linears_of(side, model)]


@scenario(needs="reset_iter_state")  # of the same version
def a_loss_in_chunks(side):
    """The head is used by itself, for each part of the hidden states, after a forward that leaves it out."""
    model = grouped(side)
    results = []
    for step in range(2):
        hidden = model(inputs(side, step), chunks=True)
        leaf = hidden.detach().requires_grad_()
        for part in leaf.chunk(3):
            model.head(part).square().sum().backward()
        hidden.backward(leaf.grad)
        results.append(grads(model))
        model.zero_grad()
    return results


@scenario(needs="reset_iter_state")  # of the same version
def grouped_modules_in_low_precision(side):
    policy = side.MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    model = grouped(side, mp_policy=policy)
    hidden = model(inputs(side), chunks=True)
    return [hidden.dtype, model.head(hidden).dtype, trained_linears_of(side, grouped(side, mp_policy=policy))]


# Activation checkpointing


def _checkpointed(side: Side, how: str, reentrant: bool) -> Any:
    model = build_net(depth=2)
    model.embedding.weight.requires_grad_(not reentrant or how != "around all")
    for i, block in enumerate(model.blocks):
        if how == "inside":
            block.up = checkpoint_wrapper(block.up, _impl(reentrant))
            side.fully_shard(block)
        elif how == "around":
            model.blocks[i] = checkpoint_wrapper(side.fully_shard(block), _impl(reentrant))
        elif how == "wrapper sharded":
            model.blocks[i] = side.fully_shard(checkpoint_wrapper(block, _impl(reentrant)))
        elif how == "hooks":
            checkpoint_by_hooks(block)
            side.fully_shard(block)
        elif how == "called":
            side.fully_shard(block)
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=reentrant)
    return trained(side, side.fully_shard(model), steps=2)


def _impl(reentrant: bool) -> CheckpointImpl:
    return CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT


for _how in ("inside", "around", "wrapper sharded", "hooks", "called"):
    for _reentrant in (False, True):
        # Both of torch's ways inside of a unit, which has hooks of its own around them; elsewhere one in turn.
        _is_chosen = EVERY or _how in ("inside", "hooks") or _reentrant == (_how == "around")
        if _is_chosen and not (_how == "hooks" and _reentrant):
            scenario(name=f"checkpoints_{_how.replace(' ', '_')}" + "_reentrant" * _reentrant)(
                functools.partial(_checkpointed, how=_how, reentrant=_reentrant)
            )


@scenario()
def compiled_blocks(side):
    torch._dynamo.reset()
    model = build_net(depth=2)
    for i, block in enumerate(model.blocks):
        block.compile(backend="eager")
        model.blocks[i] = side.fully_shard(block)
    return trained(side, side.fully_shard(model))


@scenario()
def a_compiled_model(side):
    torch._dynamo.reset()
    model = side.fully_shard(linears(4, 3, 2))
    compiled = torch.compile(model, backend="aot_eager")
    return trained(side, model, loss=lambda step: compiled(inputs(side, step)).square().mean())


# Precision


@scenario()
def policy_attributes(side):
    policy = side.MixedPrecisionPolicy()
    given = side.MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float16, False)
    mine = [policy, given, side.OffloadPolicy(), side.CPUOffloadPolicy(), side.CPUOffloadPolicy(pin_memory=False)]
    return [
        [dataclasses.asdict(each) for each in mine],
        raised(lambda: setattr(policy, "param_dtype", torch.float16)),
        given == side.MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float16, False),
        issubclass(side.CPUOffloadPolicy, side.OffloadPolicy),
        [repr(each) for each in mine],
        hash(policy) == hash(side.MixedPrecisionPolicy()),
    ]


_POLICIES = {
    "bf16": {"param_dtype": torch.bfloat16},
    "bf16_reduced_in_fp32": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "fp16": {"param_dtype": torch.float16},
    "reduced_in_bf16": {"reduce_dtype": torch.bfloat16},
    "reduced_in_fp64": {"reduce_dtype": torch.float64},
    "as_it_is": {"param_dtype": torch.float32, "reduce_dtype": torch.float32},
}

# One dtype of parameters without a dtype of reductions, and one of reductions alone, are a sample.
_CHOSEN_POLICIES = (
    _POLICIES if EVERY else {name: _POLICIES[name] for name in _POLICIES if name not in ("bf16", "reduced_in_fp64")}
)
for _name, _policy in _CHOSEN_POLICIES.items():

    def _in_low_precision(side: Side, policy: dict[str, Any]) -> Any:
        model = sharded_net(side, mp_policy=side.MixedPrecisionPolicy(**policy))
        seen = []
        model.blocks[0].up.register_forward_hook(
            lambda module, args, output: seen.append([args[0].dtype, output.dtype])
        )
        tokens, _ = token_batch(0, side.rank)
        return [model(tokens).dtype, seen, trained(side, model)]

    scenario(name=f"low_precision_{_name}")(functools.partial(_in_low_precision, policy=_policy))


@scenario()
def outputs_are_cast(side):
    model = build_net(depth=2)
    low = side.MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64)
    for block in model.blocks:
        side.fully_shard(block.up, mp_policy=low)
        side.fully_shard(block.down, mp_policy=side.MixedPrecisionPolicy(output_dtype=torch.float32))
        block.down.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    side.fully_shard(model, mp_policy=side.MixedPrecisionPolicy(output_dtype=torch.float64))
    tokens, _ = token_batch(0, side.rank)
    return [model(tokens).dtype, trained(side, model)]


@scenario()
def inputs_are_cast(side):
    """Positional and named, in containers and records, integers never; not at all, if asked."""

    @dataclasses.dataclass
    class Record:
        """A record of tensors."""

        x: Tensor
        mask: Tensor

    class Look(nn.Module):
        """Notes what it is given."""

        def __init__(self):
            super().__init__()
            seed_cpu(11)
            self.linear = nn.Linear(4, 2)

        def forward(self, x, /, pair, *, record, ids):
            seen.append([x.dtype, pair[0].dtype, pair[1]["y"].dtype, record.x.dtype, record.mask.dtype, ids.dtype])
            return self.linear(x.to(self.linear.weight.dtype)), record

    results = []
    for cast in (True, False):
        seen = []
        policy = side.MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=cast)
        model = side.fully_shard(Look(), mp_policy=policy)
        x, mask = inputs(side), torch.ones(3, dtype=torch.bool)
        output, record = model(x, (x.double(), {"y": x.half()}), record=Record(x, mask), ids=torch.arange(3))
        output.sum().backward()
        results += [seen, output.dtype, type(record).__name__, record.x.dtype, values(model)]
    return results


@scenario()
def units_with_policies_of_their_own(side):
    """A norm that stays in full precision in a model that does not."""
    model = build_net(depth=2)
    low = side.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        side.fully_shard(block.norm, mp_policy=side.MixedPrecisionPolicy(output_dtype=torch.bfloat16))
        side.fully_shard(block, mp_policy=low)
    model.blocks[0].norm.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    return trained(side, side.fully_shard(model, mp_policy=low))


@scenario()
def models_of_other_dtypes(side):
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        results.append(trained_linears_cast(side, side.fully_shard(linears(4, 3, 2).to(dtype)), dtype))
    return results


def trained_linears_cast(side: Side, model: nn.Module, dtype: torch.dtype) -> list[Any]:
    """As `trained`, with inputs of a dtype."""
    return trained(side, model, loss=lambda step: model(inputs(side, step).to(dtype)).square().mean())


@scenario()
def frozen_parameters_of_another_dtype(side):
    model = linears(4, 3, 2)
    model[0].bfloat16().requires_grad_(False)
    model[0].register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
    model[0].register_forward_hook(lambda module, args, output: output.float())
    return trained_linears_of(side, side.fully_shard(model))


@scenario()
def frozen_integers(side):
    """Quantised weights beside trained ones in a unit: all are gathered, each in its own dtype."""

    class Quantised(nn.Module):
        """A frozen int8 weight with trained scales."""

        def __init__(self):
            super().__init__()
            seed_cpu(11)
            weight = torch.randint(-9, 9, (5, 4), dtype=torch.int8)
            self.weight, self.frozen_half = nn.Parameter(weight, False), nn.Parameter(torch.ones(3).half(), False)
            self.scale = nn.Parameter(torch.rand(5, 1))

        def forward(self, x):
            return x @ (self.weight * self.scale).to(x.dtype).t() * self.frozen_half.sum()

    results = []
    for policy in (side.MixedPrecisionPolicy(), side.MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
        model = side.fully_shard(Quantised(), mp_policy=policy)
        optimizer = torch.optim.SGD([model.scale], lr=0.1)
        loss = lambda step, model=model: model(inputs(side, step)).float().square().mean()  # noqa: E731
        results += [trained(side, model, optimizer=optimizer, loss=loss), look(model)]
        model.unshard()
        results += [look(model), [param.detach().clone() for param in model.parameters()]]
        model.reshard()
    return results


@scenario()
def autocast_around(side):
    model = sharded_net(side)

    def loss(step):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, step, side.rank)

    return trained(side, model, loss=loss)


# Moving and converting


@scenario()
def converted_before_the_first_step(side):
    """Between steps torch gathers in the dtype of before, and raises; see test_fully_shard.py."""
    model = side.fully_shard(linears(4, 3, 5))
    results = []
    for convert in (nn.Module.double, nn.Module.bfloat16, nn.Module.float):
        convert(model)
        results += [look(model), values(model)]
    model.to(torch.float64)
    return [results, trained_linears_cast(side, model, torch.float64)]


@scenario()
def applied_while_unsharded(side):
    """Moves show the shards first."""
    model = side.fully_shard(linears(4, 3))
    model.unshard()
    model.to("cpu")
    seen = [look(model)]
    model.unshard()
    model._apply(lambda tensor: tensor * 2)
    return [*seen, values(model)]


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
    model.to_empty(device="cpu")
    seed_cpu(12 + side.rank)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    model.scale.fill_(2.0)
    return [seen, early, [p.device.type for p in model.parameters()], trained(side, model)]


@scenario()
def from_meta_by_values(side):
    model = _meta_net(side)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(distribute_tensor(torch.linspace(-1, 1, param.numel()).view(param.shape), param.device_mesh))
        model.scale.fill_(2.0)
    return trained(side, model)


def _real(param: Any, value: float) -> nn.Parameter:
    """A parameter on the CPU, sharded as one on meta is."""
    full = torch.linspace(-1, value, param.numel()).view(param.shape)
    return nn.Parameter(distribute_tensor(full, param.device_mesh, param.placements))


@scenario()
def from_meta_by_new_parameters(side):
    """Some are made real by `to_empty`, others replaced by real ones, which an optimizer holds."""
    with torch.device("meta"):
        model = linears(4, 6, 5)
    side.fully_shard(model[0])
    side.fully_shard(model)
    model[0].to_empty(device="cpu")
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
    model.to_empty(device="cpu")
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
    """load_state_dict(assign=True) of DTensors cut by the script."""
    model = _meta_net(side)
    full = build_net(depth=1).state_dict()
    sharded = {
        name: distribute_tensor(full[name], own.device_mesh, own.placements) if isinstance(own, DTensor) else full[name]
        for name, own in model.state_dict().items()
    }
    result = model.load_state_dict(sharded, assign=True)
    return [list(result), [type(p).__name__ for p in model.parameters()], look(model), trained(side, model)]


@scenario()
def replaced_before_the_first_step(side):
    """A parameter set anew on the module, of the same kind."""
    model = side.fully_shard(linears(4, 3))
    model[0].weight = nn.Parameter(model[0].weight.detach() * 2)
    return [look(model), trained_linears(side, model)]


@scenario()
def data_set_anew_between_steps(side):
    """Other tensors as the data of the same parameters."""
    model = side.fully_shard(linears(4, 3))
    first = trained_linears(side, model)
    for param in model.parameters():
        param.data = param.data * 0.5
    return [first, trained_linears(side, model)]


# State


@scenario()
def state_dicts_at_each_moment(side):
    """Always of shards, whatever is registered."""
    model = sharded_net(side)
    results = [model.state_dict()]
    model.unshard()
    results.append(model.state_dict())
    loss = loss_of(model, 0, side.rank)
    results.append(copy.deepcopy(model.state_dict()))
    results.append(copy.deepcopy(model.blocks[0].state_dict(prefix="block.")))
    loss.backward()
    results += [model.state_dict(keep_vars=True), grads(model), model.head.state_dict()]
    return results


@scenario()
def state_dicts_alias_the_parameters(side):
    model = sharded_net(side)
    state = model.state_dict()
    results = trained(side, model)
    return [results, state]


@scenario()
def states_are_loaded(side):
    results = []
    for assign in (False, True):
        model = sharded_net(side)
        seed_cpu(20)
        other = sharded_net(side, Net(depth=2))
        trained(side, model)
        before = list(model.parameters())
        state = copy.deepcopy(other.state_dict())
        result = model.load_state_dict(state, assign=assign)
        same = [a is b for a, b in zip(before, model.parameters(), strict=True)]
        results += [list(result), same if not assign else None, values(model), trained(side, model)]
    return results


@scenario()
def a_part_of_a_state_is_loaded(side):
    model = sharded_net(side)
    state = {name: value * 2 for name, value in model.state_dict().items() if "up" in name}
    missing, unexpected = model.load_state_dict(state | {"other": torch.ones(2)}, strict=False)
    return [missing, unexpected, values(model), raised(lambda: model.load_state_dict(state))]


@scenario()
def full_tensors_are_not_loaded(side):
    model = sharded_net(side)
    return [raised(lambda: model.load_state_dict(build_net(depth=2).state_dict()))]


@scenario()
def a_state_is_saved(side):
    """By torch.save, read again, and loaded."""
    model = sharded_net(side)
    trained(side, model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=False)
    fresh = sharded_net(side)
    fresh.load_state_dict(state)
    return [state, trained(side, fresh)]


@scenario()
def states_by_the_checkpoint_library(side):
    """torch.distributed.checkpoint.state_dict: full, on the CPU, from the first rank; the optimizer's too."""
    model = sharded_net(side)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    trained(side, model, optimizer=optimizer)
    first = checkpoint_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    everywhere = checkpoint_state.StateDictOptions(full_state_dict=True)
    spread = checkpoint_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    on_the_first = [dict(part) for part in checkpoint_state.get_state_dict(model, optimizer, options=first)]
    sharded = [dict(part) for part in checkpoint_state.get_state_dict(model, optimizer)]
    state, optim = checkpoint_state.get_state_dict(model, optimizer, options=everywhere)
    fresh = sharded_net(side, Net(depth=2))
    again = torch.optim.AdamW(fresh.parameters(), lr=0.05)
    checkpoint_state.set_state_dict(fresh, again, model_state_dict=state, optim_state_dict=optim, options=spread)
    return [on_the_first, sharded, dict(state), dict(optim), trained(side, fresh, optimizer=again)]


# Reduction and gathering


def _counting(base: type, kind: str, seen: list[Any]) -> Any:
    """A collective of the user's, which notes what it is given."""

    class Counting(base):
        """Allocates and communicates as usual."""

        def allocate(self, size, *, dtype, device):
            seen.append([kind, "allocate", tuple(size), dtype, device.type])
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, *args, **kwargs):
            seen.append(
                [kind, tuple(output_tensor.shape), tuple(input_tensor.shape), output_tensor.dtype, group.size()]
            )
            if kind == "gather":
                return dist.all_gather_into_tensor(output_tensor, input_tensor, *args, group=group, **kwargs)
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, *args, group=group, **kwargs)

    return Counting()


def _comm_base(side: Side, name: str) -> type:
    """The class to derive a collective from, which torch keeps in a private module."""
    there = side.name if side.name == "torch_backend" else "torch.distributed.fsdp._fully_shard._fsdp_api"
    return getattr(import_module(there), name)


@scenario()
def collectives_of_the_user(side):
    results = []
    for policy in (side.MixedPrecisionPolicy(), side.MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
        seen: list[Any] = []
        model = sharded_net(side, mp_policy=policy)
        for unit in (model, *model.blocks):
            unit.set_custom_all_gather(_counting(_comm_base(side, "AllGather"), "gather", seen))
            unit.set_custom_reduce_scatter(_counting(_comm_base(side, "ReduceScatter"), "reduce", seen))
        results += [trained(side, model), Counter(map(repr, seen))]
    return results


@scenario()
def collectives_of_a_step(side):
    """How many of each kind: with all that changes their number."""
    results = []
    for case in ("as it is", "kept", "no sync", "not resharded after backward", "no gradient"):
        model = sharded_net(side, reshard_after_forward=False if case == "kept" else None)
        model.set_requires_gradient_sync(case != "no sync")
        model.set_reshard_after_backward(case != "not resharded after backward")
        for step in range(2):
            with CommDebugMode() as counts, torch.set_grad_enabled(case != "no gradient"):
                loss = loss_of(model, step, side.rank)
                if case != "no gradient":
                    loss.backward()
            results.append({str(kind): count for kind, count in sorted(counts.get_comm_counts().items(), key=str)})
    return results


@scenario()
def collectives_that_are_replaced_by_name(side):
    """PyTorch's own tests count collectives by replacing them in torch.distributed."""
    seen = []

    def counting(kind, original, *args, **kwargs):
        seen.append(kind)
        return original(*args, **kwargs)

    model = sharded_net(side)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather_single", "reduce_scatter_single", "all_gather_into_tensor", "reduce_scatter_tensor"):
            if hasattr(dist, name):
                patch.setattr(dist, name, functools.partial(counting, name[:3], getattr(dist, name)))
        trained(side, model)
    return Counter(seen)


@scenario()
def prefetched_as_told(side):
    """Gathers come in another order; nothing else changes. Sizes tell the layers from each other."""
    model, seen = linears(4, 3, 5, 2, 7, 4), []
    layers = [side.fully_shard(layer) for layer in model]
    side.fully_shard(model)
    model.set_modules_to_forward_prefetch(layers[:2])
    for i, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 3])
        layer.set_modules_to_backward_prefetch(layers[max(i - 2, 0) : i])
        layer.set_custom_all_gather(_counting(_comm_base(side, "AllGather"), "gather", seen))
        layer.register_forward_pre_hook(lambda module, args, i=i: seen.append(i))
        layer.register_forward_hook(lambda module, args, output, i=i: seen_in_backward(output, i))

    def seen_in_backward(output, i):
        output.register_hook(lambda grad: seen.append(-i))

    return [trained_linears(side, model), seen]


@scenario()
def prefetched_and_then_not(side):
    model = sharded_net(side)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    first = trained(side, model)
    model.blocks[0].set_modules_to_forward_prefetch([])
    model.blocks[1].set_modules_to_backward_prefetch([])
    return [first, trained(side, model)]


@scenario()
def a_hook_after_the_reduction(side):
    seen = []

    def hook(reduced):
        seen.append(reduced.clone())
        reduced.mul_(0.5).add_(1)

    results = []
    for policy in (side.MixedPrecisionPolicy(), side.MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
        model = sharded_net(side, mp_policy=policy)
        model.set_all_reduce_hook(hook)
        for block in model.blocks:
            block.set_all_reduce_hook(hook)
        results += [trained(side, model), seen]
    return results


def _divided(side: Side, factor: float, how: str) -> Any:
    """torch has no PREMUL_SUM on gloo; a sum does, and so do dtypes that overflow."""
    policy = (
        side.MixedPrecisionPolicy(reduce_dtype=getattr(torch, how)) if how != "sum" else side.MixedPrecisionPolicy()
    )
    model = sharded_net(side, mp_policy=policy)
    for unit in (model, *model.blocks):
        unit.set_gradient_divide_factor(factor)
        unit.set_force_sum_reduction_for_comms(how == "sum")
    return trained(side, model)


for _factor, _kind_of_sum in ((3.0, "sum"), (1.0, "sum"), (3.0, "float64"), (8.0, "float16")):
    scenario(name=f"divided_by_{_factor:.0f}_{_kind_of_sum}")(
        functools.partial(_divided, factor=_factor, how=_kind_of_sum)
    )


@scenario()
def divided_by_the_number_of_ranks(side):
    """The one factor that torch's gloo has for float32."""
    model = sharded_net(side)
    model.set_gradient_divide_factor(2.0)
    return trained(side, model)


@scenario()
def sums_are_forced(side):
    model = sharded_net(side)
    model.set_force_sum_reduction_for_comms(True)
    return trained(side, model)


@scenario(needs="set_reduce_scatter_max_input_buffers")
def buffers_of_reductions(side):
    """Memory for overlap: nothing changes."""
    model = sharded_net(side)
    model.set_reduce_scatter_max_input_buffers(3)
    model.blocks[0].set_reduce_scatter_max_input_buffers(1, recurse=False)
    return [
        trained(side, model),
        [raised(lambda n=n: model.set_reduce_scatter_max_input_buffers(n)) for n in (True, 2.0, "2", None, 0, -1)],
    ]


@scenario(needs="set_separate_reduce_scatter_group")
def a_group_for_reductions(side):
    model = sharded_net(side)
    model.set_separate_reduce_scatter_group()
    first = trained(side, model)
    model.set_separate_reduce_scatter_group(False, recurse=False)
    return [first, trained(side, model)]


@scenario()
def not_unsharded_in_backward(side):
    """An embedding does not need its weights there."""
    model = build_net(depth=2)
    side.fully_shard(model.embedding)
    model.embedding.set_unshard_in_backward(False)
    seen = []
    model.embedding.set_custom_all_gather(_counting(_comm_base(side, "AllGather"), "gather", seen))
    return [trained(side, sharded_net(side, model)), len(seen)]


@scenario()
def an_event_after_the_optimizer(side):
    model = sharded_net(side)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    for step in range(3):
        loss_of(model, step, side.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.set_post_optim_event(torch.Event("cpu"))
        results.append(values(model))
    return results


@scenario()
def memory_from_the_process_group(side):
    """gloo has none to give: as usual."""
    results = []
    for enable in (False, True):
        model = sharded_net(side)
        results.append(raised(lambda model=model, enable=enable: use_memory_of_the_group(model, enable)))
        results.append(trained(side, model))
    return results


def use_memory_of_the_group(model: nn.Module, enable: bool) -> None:
    """Ask for it in all units."""
    for unit in (model, *model.blocks):
        unit.set_allocate_memory_from_process_group_for_comm(enable)


@scenario(needs="share_comm_ctx")
def two_models_share_streams(side):
    models = [sharded_net(side), sharded_net(side)]
    side.share_comm_ctx([])
    side.share_comm_ctx(models)
    return [trained(side, model) for model in models] + [raised(lambda: side.share_comm_ctx([nn.Linear(2, 2)]))]


# Failures, and what comes after


@scenario(needs="reset_iter_state")
def after_an_exception_in_forward(side):
    """A reset, and a training. After one in backward torch adds what the failed backward left; see test_fully_shard.py."""
    model = sharded_net(side)
    fails = [True]

    def fail(*_):
        if fails:
            fails.pop()
            raise KeyError("once")

    model.blocks[1].up.register_forward_pre_hook(fail)
    error = raised(lambda: loss_of(model, 0, side.rank))
    model.reset_iter_state()
    return [error, look(model), trained(side, model), raised(model.blocks[0].reset_iter_state)]


# Offload


@scenario()
def offloaded(side):
    """On a mesh of CPUs nothing moves."""
    model = sharded_net(side, offload_policy=side.CPUOffloadPolicy(pin_memory=False))
    return [look(model), trained(side, model)]


@scenario()
def offloaded_and_accumulated(side):
    model = sharded_net(side, offload_policy=side.CPUOffloadPolicy(pin_memory=False))
    results = []
    for step in range(3):
        model.set_requires_gradient_sync(step != 0)
        loss_of(model, step, side.rank).backward()
        results.append(grads(model))
    return results


# Placements


@scenario()
def cut_on_other_dims(side):
    def place(param):
        return Shard(1) if param.ndim == 2 and param.shape[1] % 2 == 0 else None

    seed_cpu(13)
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.Flatten(), nn.Linear(16, 5), nn.Linear(5, 3))
    for layer in (model[0], model[2]):
        side.fully_shard(layer, shard_placement_fn=lambda p: Shard(p.ndim - 2) if p.ndim == 3 else place(p))
    side.fully_shard(model, shard_placement_fn=place)
    run = lambda step: model(inputs(side, step, width=12).view(3, 2, 6)).square().mean()  # noqa: E731
    return [look(model), trained(side, model, loss=run), [p.full_tensor().detach() for p in model.parameters()]]


@scenario()
def cut_on_a_dim_from_the_end(side):
    model = side.fully_shard(linears(4, 3), shard_placement_fn=lambda p: Shard(-1) if p.ndim == 2 else Shard(0))
    return [look(model), trained_linears(side, model, 1)]


# Two axes


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
    """Two ranks are all of a shard group: as True."""
    model = side.fully_shard(linears(8, 4), mesh=hybrid_mesh(), reshard_after_forward=2)
    model(inputs(side, width=8)).sum().backward()
    return [look(model), values(model)]


def trained_in_parallel(side: Side, how: str, dtype: torch.dtype = torch.float32, **options: Any) -> list[Any]:
    model = parallel(side, how, dtype, **options)
    group = side.rank // 2
    data = torch.Generator().manual_seed(15)
    x = torch.randn(2, 3, 4, 6, generator=data, dtype=dtype)[group]
    if how == "sequence":
        x = x.chunk(2, dim=1)[side.rank % 2]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
    full = {name: [p.full_tensor().detach(), p.grad.full_tensor()] for name, p in model.named_parameters()}
    return [loss.detach(), values(model), full, look(model)]


@scenario(num_ranks=4)
def tensor_parallel(side):
    return trained_in_parallel(side, "columns")


def _checkpointed_in_parallel(side: Side, how: str, reshard: bool) -> list[Any]:
    """Tensor parallelism with activations that are computed again, by all ways that torch has for it."""

    class Checkpointed(nn.Module):
        """Computes `inner` again in backward."""

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=how.endswith("reentrant"))

    mesh = mesh_of((2, 2), ("dp", "tp"))
    model = linears(6, 8, 6, 8, 6)
    parts = nn.Sequential()
    for i in (0, 2):
        layers = nn.Sequential(model[i], nn.ReLU(), model[i + 1])
        parallelize_module(layers, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if how == "by_hooks":
            checkpoint_by_hooks(layers)
        part = checkpoint_wrapper(layers) if how == "by_wrapper" else layers
        part = Checkpointed(part) if how.startswith("inside") else part
        side.fully_shard(part, mesh=mesh["dp"], reshard_after_forward=reshard)
        parts.append(Checkpointed(part) if how.startswith("around") else part)
    side.fully_shard(parts, mesh=mesh["dp"], reshard_after_forward=reshard)
    for step in range(2):
        x = inputs(side, step, 6).requires_grad_()
        dist.broadcast(x.detach(), group=mesh["tp"].get_group(), group_src=0)
        parts(x).square().sum().backward()
    return values(parts)


for _way in ("by_hooks", "by_wrapper", "inside", "inside_reentrant", "around", "around_reentrant"):
    # What is recomputed gathers again, or not: both in turn.
    for _reshard in (True, False) if EVERY else (_way in ("by_hooks", "inside_reentrant", "around"),):
        scenario(4, name=f"tensor_parallel_checkpointed_{_way}_{'resharded' if _reshard else 'kept'}")(
            functools.partial(_checkpointed_in_parallel, how=_way, reshard=_reshard)
        )


@scenario(num_ranks=4)
def tensor_parallel_parameters_in_the_loss(side):
    """What `unshard` registered is computed with outside of a forward, of parameters frozen at first too."""
    model = parallel(side, "columns", torch.float32)
    model[1].down.bias.requires_grad_(False)
    model[1].down.bias.requires_grad_(True)
    loss = model(torch.ones(3, 6) * (1 + side.rank // 2)).square().sum()
    for part in model:
        part.unshard()
    penalty = sum(
        p.full_tensor().square().sum() if isinstance(p, DTensor) else p.square().sum() for p in model.parameters()
    )
    (loss + 4 * penalty).backward()
    return values(model)


@scenario(num_ranks=4)
def tensor_parallel_in_low_precision(side):
    return trained_in_parallel(side, "columns", mp_policy=side.MixedPrecisionPolicy(torch.bfloat16, torch.float32))


@scenario(num_ranks=4)
def sequenceparallel(side):
    return trained_in_parallel(side, "sequence")


@scenario(num_ranks=4)
def tensor_parallel_cut_on_other_dims(side):
    """Columns and rows cut on the dim that tensor parallelism leaves."""
    return trained_in_parallel(
        side, "columns", shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 and p.shape[1] % 4 == 0 else None
    )


@scenario(num_ranks=4)
def tensor_parallel_from_meta(side):
    with torch.device("meta"):
        model = parallel(side, "columns", torch.float32)
    seen = look(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().copy_(torch.linspace(-1, 1, param.to_local().numel()).view(param.to_local().shape))
    model(torch.ones(3, 6) * (1 + side.rank // 2)).square().sum().backward()
    return [seen, values(model)]


@scenario(num_ranks=4)
def hybrid_and_cut_on_other_dims(side):
    model = linears(4, 6, 2)
    cut = {"mesh": hybrid_mesh(), "shard_placement_fn": lambda param: Shard(param.ndim - 1)}
    side.fully_shard(model[0], **cut)
    return [trained_linears(side, side.fully_shard(model, **cut)), look(model)]


@scenario(num_ranks=4)
def tensor_parallel_in_replicas(side):
    """A mesh of three axes: one replica, two shards, two of tensor parallelism."""
    mesh = mesh_of((1, 2, 2), ("replicate", "shard", "tp"))
    model = linears(6, 8, 4)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    side.fully_shard(model[0], mesh=mesh["replicate", "shard"])
    side.fully_shard(model, mesh=mesh["replicate", "shard"])
    model(torch.ones(3, 6) * (1 + side.rank // 2)).square().sum().backward()
    return [look(model), values(model)]


@scenario(num_ranks=4)
def sequence_parallel_clipped(side):
    model = parallel(side, "sequence", torch.float32)
    model(torch.ones(3, 2, 6) * (1 + side.rank)).square().sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return [norm.full_tensor(), values(model)]


@scenario(num_ranks=4)
def tensor_parallel_states(side):
    """State dicts and loading of parameters on two axes."""
    model = parallel(side, "columns", torch.float32)
    model(torch.ones(3, 6) * (1 + side.rank // 2)).square().sum().backward()
    state = copy.deepcopy(model.state_dict())
    fresh = parallel(side, "columns", torch.float32)
    with torch.no_grad():
        for param in fresh.parameters():
            param.zero_()
    fresh.load_state_dict(state)
    return [state, values(model), values(fresh)]


def _on_a_full_mesh(side: Side, shape: tuple[int, ...], names: tuple[str, ...], **dims: Any) -> list[Any]:
    """Parameters that are DTensors on the whole mesh, replicated where data is parallel."""
    mesh = mesh_of(shape, names)
    seed_cpu(16)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))

    def place(name, module, mesh):
        for key, param in module.named_parameters(recurse=False):
            placements = [Replicate() for _ in names]
            if "tp" in names and name == "0":
                placements[names.index("tp")] = Shard(0)
            elif "tp" in names and key == "weight":
                placements[names.index("tp")] = Shard(1)
            module.register_parameter(key, nn.Parameter(distribute_tensor(param.detach(), mesh, placements)))

    distribute_module(model, mesh, place)
    dp_mesh_dims = side.DataParallelMeshDims(**dims)
    side.fully_shard(model[2], mesh=mesh, dp_mesh_dims=dp_mesh_dims)
    side.fully_shard(model, mesh=mesh, dp_mesh_dims=dp_mesh_dims)
    seen = [look(model)]
    batch = side.rank // 2 if "tp" in names else side.rank
    x = DTensor.from_local(torch.full((3, 6), batch + 1.0), mesh, [Replicate() for _ in names])
    for _ in range(2):
        output = model(x)
        output.redistribute(placements=[Replicate() for _ in names]).to_local().square().sum().backward()
    return [*seen, values(model), look(model)]


@scenario(num_ranks=4, needs="DataParallelMeshDims")
def a_full_mesh_with_tensor_parallelism(side):
    return _on_a_full_mesh(side, (2, 2), ("dp", "tp"), shard="dp")


@scenario(num_ranks=4, needs="DataParallelMeshDims")
def a_full_mesh_of_data_parallelism(side):
    return _on_a_full_mesh(side, (2, 2), ("replicate", "shard"), shard="shard", replicate="replicate")


@scenario(num_ranks=4, needs="DataParallelMeshDims")
def a_full_mesh_of_replicas_alone(side):
    return _on_a_full_mesh(side, (2, 2), ("replicate", "tp"), replicate="replicate")


@scenario(num_ranks=4, needs="DataParallelMeshDims")
def a_full_mesh_of_three_axes(side):
    return _on_a_full_mesh(side, (1, 2, 2), ("replicate", "shard", "tp"), shard="shard", replicate="replicate")


@scenario(num_ranks=4, needs="DataParallelMeshDims")
def a_full_mesh_whose_dims_are_flattened(side):
    return _on_a_full_mesh(side, (2, 2), ("a", "b"), shard=("a", "b"))


# Beside replicas of DistributedDataParallel


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


# Tensor subclasses


class Rounded(Tensor):
    """A tensor that travels as int8, with the largest of each shard."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(parts, meta, outer_size, outer_stride):
        return Rounded(parts["inner"])

    def __repr__(self):
        return f"Rounded({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        done = func(
            *tree_map_only(Rounded, lambda t: t.inner, args), **tree_map_only(Rounded, lambda t: t.inner, kwargs or {})
        )
        if func.__name__.split(".")[0].endswith("_") and isinstance(args[0], Rounded):
            return args[0]
        return tree_map_only(Tensor, Rounded, done)

    def fsdp_pre_all_gather(self, mesh):
        """The old form, which is given the mesh alone."""
        largest = self.inner.abs().max().view(1)
        return ((self.inner / largest * 127).round().to(torch.int8), largest), self.inner.shape[0]

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        """Each shard's rows by its largest."""
        small, largest = all_gather_outputs
        full = small.to(param_dtype) * largest.to(param_dtype).repeat_interleave(metadata).view(-1, 1) / 127
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(full)
            return None
        return full, (full,)


def _of_a_subclass(side: Side, wrap: Callable[[Tensor], Tensor], widths: tuple[int, ...], **options: Any) -> list[Any]:
    asked.clear(), given.clear()
    model = linears(*widths)
    for layer in model:
        layer.weight = nn.Parameter(wrap(layer.weight.detach()))
        side.fully_shard(layer, **options)
    side.fully_shard(model, **options)
    results = []
    for step in range(2):
        loss = model(inputs(side, step, widths[0])).float().square().mean()
        loss.backward()
        results += [loss.detach(), [g.to_local() for g in grads(model)], look(model)]
    return [results, asked, given]


@scenario()
def a_subclass_of_two_tensors(side):
    return _of_a_subclass(side, lambda w: Both(w, w / 2), (4, 6, 2))


@scenario()
def a_subclass_of_two_tensors_in_low_precision(side):
    policy = side.MixedPrecisionPolicy(param_dtype=torch.bfloat16)

    return _of_a_subclass(side, lambda w: Rounded(w), (4, 6, 2), mp_policy=policy)


@scenario()
def a_subclass_that_travels_as_int8(side):
    return _of_a_subclass(side, Rounded, (4, 6, 2))


class Padded(Rounded):
    """A tensor that pads its rows to what the first rank has, since all ranks must send equally much."""

    @staticmethod
    def __tensor_unflatten__(parts, meta, outer_size, outer_stride):
        return Padded(parts["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        done = super().__torch_dispatch__(func, types, args, kwargs)
        return tree_map_only(Rounded, lambda t: t if isinstance(t, Padded) else Padded(t.inner), done)

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        """The rows of the first rank, those that are not here as NaN."""
        asked.append(tuple(outer_size))
        padded = self.inner.new_full((-(-outer_size[0] // mesh.size()), *outer_size[1:]), math.nan)
        padded[: self.inner.shape[0]] = self.inner
        return (padded,), None

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        """What was gathered, padding included."""
        (full,) = all_gather_outputs
        given.append([tuple(full.shape), None if out is None else tuple(out.shape)])
        return None if out is not None else (full, (full,))


@scenario()
def a_subclass_whose_rows_are_uneven(side):
    return _of_a_subclass(side, Padded, (4, 5, 3))


@scenario(num_ranks=4)
def a_subclass_of_fewer_rows_than_ranks(side):
    return _of_a_subclass(side, Padded, (4, 5, 2))


@scenario()
def a_subclass_from_meta(side):
    """Nothing is asked for before the first gather."""
    asked.clear(), given.clear()
    with torch.device("meta"):
        model = nn.Linear(4, 6, bias=False)
        model.weight = nn.Parameter(Both(model.weight.detach(), model.weight.detach().clone()))
    side.fully_shard(model)
    before = len(asked)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.weight.fill_(0.5)
    results = []
    for step in range(2):
        loss = model(inputs(side, step)).square().sum()
        loss.backward()
        results += [loss.detach(), grads(model)[0].to_local()]
    return [before, results, asked, given]


# What is refused


def refusal(num_ranks: int = 2, needs: str = "") -> Callable[[Callable], Callable]:
    """Register what torch refuses; the exception is compared."""

    def register(fn: Callable[[Side], Any]) -> Callable[[Side], Any]:
        def refused(side: Side) -> Any:
            return [raised(lambda: fn(side))]

        scenario(num_ranks, needs, f"refused_{fn.__name__}")(refused)
        return fn

    return register


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
def uneven_sizes_on_another_dim(side):
    side.fully_shard(nn.Linear(3, 2), shard_placement_fn=lambda p: Shard(p.ndim - 1))


@refusal()
def placements_that_are_none(side):
    side.fully_shard(nn.Linear(4, 2), shard_placement_fn=lambda p: Replicate())


@refusal()
def placements_on_a_dim_that_is_not_there(side):
    side.fully_shard(nn.Linear(4, 2), shard_placement_fn=lambda p: Shard(2))


@refusal()
def replicating_a_unit(side):
    replicate(side.fully_shard(nn.Linear(4, 2)))


@refusal()
def sharding_twice(side):
    model = side.fully_shard(nn.Linear(4, 2))
    side.fully_shard(model)


@refusal(num_ranks=4)
def a_group_size_that_does_not_divide(side):
    side.fully_shard(nn.Linear(4, 2), reshard_after_forward=3)


@refusal()
def a_group_size_of_nothing(side):
    side.fully_shard(nn.Linear(4, 2), reshard_after_forward=0)


@refusal()
def a_group_size_that_is_too_large(side):
    side.fully_shard(nn.Linear(4, 2), reshard_after_forward=4)


@refusal()
def resharding_by_a_word(side):
    side.fully_shard(nn.Linear(4, 2), reshard_after_forward="yes")


@refusal()
def resharding_by_a_fraction(side):
    side.fully_shard(nn.Linear(4, 2), reshard_after_forward=2.0)


@refusal()
def a_later_group_size(side):
    side.fully_shard(nn.Linear(4, 2)).set_reshard_after_forward(2)


@refusal(num_ranks=4)
def a_mesh_of_three_axes(side):
    side.fully_shard(nn.Linear(4, 2), mesh=mesh_of((2, 2, 1), ("a", "b", "c")))


@refusal(num_ranks=4)
def two_axes_without_names(side):
    side.fully_shard(nn.Linear(4, 2), mesh=init_device_mesh("cpu", (2, 2)))


@refusal(needs="DataParallelMeshDims")
def no_axis_of_data(side):
    side.DataParallelMeshDims()


@refusal(needs="DataParallelMeshDims")
def an_axis_that_is_not_there(side):
    side.fully_shard(nn.Linear(4, 2), mesh=mesh_of((2,), ("a",)), dp_mesh_dims=side.DataParallelMeshDims(shard="b"))


@refusal(needs="DataParallelMeshDims")
def axes_without_names(side):
    mesh = init_device_mesh("cpu", (2,))
    side.fully_shard(nn.Linear(4, 2), mesh=mesh, dp_mesh_dims=side.DataParallelMeshDims(shard="b"))


@refusal(needs="DataParallelMeshDims")
def plain_tensors_on_a_full_mesh(side):
    side.fully_shard(nn.Linear(4, 2), mesh=mesh_of((2,), ("a",)), dp_mesh_dims=side.DataParallelMeshDims(shard="a"))


@refusal()
def prefetching_what_is_not_sharded(side):
    side.fully_shard(nn.Linear(4, 2)).set_modules_to_forward_prefetch([nn.Linear(2, 2)])


@refusal()
def prefetching_backward_what_is_not_sharded(side):
    side.fully_shard(nn.Linear(4, 2)).set_modules_to_backward_prefetch([nn.Linear(2, 2)])


@refusal()
def copying(side):
    copy.deepcopy(side.fully_shard(nn.Linear(4, 2)))


@refusal()
def a_method_that_is_not_there(side):
    side.register_fsdp_forward_method(side.fully_shard(nn.Linear(4, 2)), "encode")


@refusal()
def sharing_across_units(side):
    """torch says so at the first forward; where it is said is not compared."""
    model = linears(4, 4, 4)
    model[1].weight = model[0].weight
    side.fully_shard(model[0])
    side.fully_shard(model)(inputs(side))


@refusal()
def a_forward_on_meta(side):
    with torch.device("meta"):
        model = nn.Linear(4, 2)
    side.fully_shard(model)(inputs(side))


@refusal()
def a_root_after_its_parts(side):
    model = linears(4, 3, 2)
    side.fully_shard(model[0])(inputs(side))
    side.fully_shard(model)(inputs(side))


@refusal()
def a_list_as_the_root(side):
    model = linears(4, 3, 2)
    side.fully_shard(list(model))
    model(inputs(side))


@refusal()
def memory_that_only_one_backend_has(side):
    side.fully_shard(nn.Linear(4, 2)).set_symm_mem_for_comm("NVLINK")


@refusal(num_ranks=4)
def a_stream_where_replicas_have_one(side):
    model = side.fully_shard(nn.Linear(4, 2), mesh=hybrid_mesh())
    model.set_all_reduce_hook(lambda reduced: None, stream=object())


@refusal()
def half_an_extension(side):
    class Half(Rounded):
        """Gathers, and does not put together."""

        fsdp_post_all_gather = property()

    model = nn.Linear(4, 2)
    model.weight = nn.Parameter(Half(model.weight.detach()))
    side.fully_shard(model)(inputs(side))


# Blocks are compiled in a scenario of their own, in half the time.
LONG = ("a_compiled_model",)
# What is not the same yet, and why.
KNOWN: dict[str, str] = {
    "hooks_of_the_user_see_parameters": "in forward an attribute of a module is a plain tensor, and no Parameter",
    "frozen_integers": "refused",
}


def _cases() -> Iterator[Any]:
    assert KNOWN.keys() <= SCENARIOS.keys()
    # By the number of ranks, so that those of one world run one after another.
    for name, each in sorted(SCENARIOS.items(), key=lambda item: item[1].num_ranks):
        marks: list[Any] = []
        if name in KNOWN:
            marks.append(pytest.mark.xfail(strict=True, reason=KNOWN[name]))
        if not each.there:
            marks = [pytest.mark.skip(reason="this torch does not have it")]
        if name in LONG:
            marks.append(pytest.mark.exhaustive)
        yield pytest.param(name, id=name, marks=marks)


def _compare(rank: int, world_size: int, name: str) -> str:
    return compare(SCENARIOS[name].fn, *(Side(package, rank, world_size) for package in PACKAGES))


@pytest.mark.parametrize("name", list(_cases()))
def test_R32_a_script_sees_what_it_sees_under_torch(ranks, name):
    num_ranks = SCENARIOS[name].num_ranks
    assert ranks.run(num_ranks, _compare, name) == [""] * num_ranks
