"""Unsharding and resharding, during a step and by hand, and what is registered when."""

# pyright: reportAttributeAccessIssue=false

import functools
from typing import Any

import torch
from torch import Tensor, nn

from tests.on_torch.fsdp2.scripts import refusal, scenario
from tests.on_torch.helpers.fsdp2_models import linears, look, sharded_net, trained, trained_linears, values
from tests.on_torch.helpers.models import build_net, loss_of, seed_cpu
from tests.on_torch.helpers.scripts import Side, grads, inputs


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
    """Half of each parameter between forward and backward. 2 does not divide the rows of the head, for whose values see R08."""
    return _seen_in_a_step(side, 2)


@scenario(num_ranks=4)
def resharded_to_fewer_ranks(side):
    """Values between forward and backward, with sizes that the number of ranks divides."""
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
    """Numbers of ranks that mean the same as True and False."""
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
