"""Training steps, and orders of forward and backward other than one after the other."""

# pyright: reportArgumentType=false

import contextlib
import functools
from typing import Any

import torch
from torch import nn

from tests.on_torch.fsdp2.scripts import scenario
from tests.on_torch.helpers.fsdp2_models import linears, look, sharded_net, trained, trained_linears, values
from tests.on_torch.helpers.models import Spectral, build_net, loss_of, seed_cpu
from tests.on_torch.helpers.scripts import Side, grads, inputs, raised


@scenario()
def batch_norm_and_its_buffers(side):
    seed_cpu(4)
    model = nn.Sequential(nn.Linear(4, 5), side.fully_shard(nn.BatchNorm1d(5)))
    side.fully_shard(model)
    results = trained_linears(side, model)
    model.eval()
    return [results, {name: buffer.clone() for name, buffer in model.named_buffers()}, model(inputs(side)).detach()]


for _reshard in (None, True, False):

    def _trains(side: Side, reshard: bool | None) -> Any:
        model = sharded_net(side, **({} if reshard is None else {"reshard_after_forward": reshard}))
        return trained(side, model, steps=3, optimizer=torch.optim.AdamW(model.parameters(), lr=0.05))

    scenario(name=f"trains_{_reshard}")(functools.partial(_trains, reshard=_reshard))


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
    """A forward in evaluation, with and without no_grad, before training."""
    results = []
    for context, reshard in ((torch.no_grad, True), (contextlib.nullcontext, False), (torch.no_grad, None)):
        model = sharded_net(side, **({} if reshard is None else {"reshard_after_forward": reshard}))
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.1
        )  # before forward, after which parameters may be unsharded
        model.eval()
        with context():
            results.append(loss_of(model, 0, side.rank).detach().clone())
        results.append(look(model))
        model.train()
        results.append(trained(side, model, optimizer=optimizer))
    return results


@scenario()
def inference_mode(side):
    """torch cannot train afterwards; see test_fully_shard.py."""
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
    """The root stays unsharded after a forward without gradients, and must not show old values after a step."""
    model = sharded_net(side)
    with torch.no_grad():
        before = loss_of(model, 0, side.rank)
    results = trained(side, model)
    with torch.no_grad():
        after = loss_of(model, 0, side.rank)
    return [before, results, after]


@scenario()
def compiled_blocks(side):
    torch._dynamo.reset()
    model = build_net(depth=2)
    for i, block in enumerate(model.blocks):
        block.compile(backend="eager")
        model.blocks[i] = side.fully_shard(block)
    return trained(side, side.fully_shard(model))


@scenario(exhaustive=True)  # blocks are compiled in `compiled_blocks`, in half the time
def a_compiled_model(side):
    torch._dynamo.reset()
    model = side.fully_shard(linears(4, 3, 2))
    compiled = torch.compile(model, backend="aot_eager")
    return trained(side, model, loss=lambda step: compiled(inputs(side, step)).square().mean())


@scenario(needs="reset_iter_state")
def after_an_exception_in_forward(side):
    """Trains after a reset. After a failed backward torch adds its gradients to the next; see test_fully_shard.py."""
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


@scenario()
def complex_parameters(side):
    seed_cpu(6)
    model = nn.Sequential(nn.Linear(4, 6), Spectral(6), nn.Linear(6, 2))
    policy = side.MixedPrecisionPolicy(reduce_dtype=torch.float64)
    for part, options in ((model[1], {}), (model, {"mp_policy": policy})):
        side.fully_shard(part, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    results = []
    for step in range(3):
        optimizer.zero_grad()
        model(inputs(side, step)).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        results.append([norm, values(model)])
    return [results, model.state_dict()]
