"""Accumulation, microbatches, unused parameters, and gradients of gradients."""

# pyright: reportAttributeAccessIssue=false, reportReturnType=false

import functools
from typing import Any

import torch
from torch import nn

from tests.on_torch.fsdp2.scripts import scenario
from tests.on_torch.helpers.device import DEVICE
from tests.on_torch.helpers.fsdp2_models import hybrid_mesh, linears, sharded_net, trained, values
from tests.on_torch.helpers.models import build_net, loss_of, seed_cpu
from tests.on_torch.helpers.scenarios import EVERY
from tests.on_torch.helpers.scripts import Side, grads, inputs


def _gradients_of_gradients(side: Side, **options: Any) -> list[Any]:
    model = linears(4, 5, 3)
    for part in (model[0], model):
        side.fully_shard(part, **options)
    for step in range(2):
        model(inputs(side, step)).square().sum().backward(create_graph=True)
    return values(model)


@scenario()
def backward_that_creates_a_graph(side):
    """The gradients of sharded parameters have no graph."""
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
def microbatches_of_a_pipeline(side):
    """All forwards, then all backwards; the last backward reduces."""
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
def unused_parameters(side):
    """Parameters that no rank uses get no gradient."""
    model = build_net(depth=2)
    model.spare = nn.Linear(3, 2)
    model.blocks[1].spare = nn.Parameter(torch.ones(3))
    return trained(side, sharded_net(side, model))


@scenario(needs="set_reduce_scatter_unused_params")
def unused_parameters_are_reduced(side):
    """A rank that does not use a parameter contributes zeros, if asked for."""

    class Choice(nn.Module):
        """Uses the named part."""

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
def zero_grad_either_way(side):
    model = sharded_net(side)
    results = []
    for to_none in (False, True, False):
        loss_of(model, 0, side.rank).backward()
        results.append(grads(model))
        model.zero_grad(set_to_none=to_none)
        results.append(grads(model))
    return results


def _accumulated(side: Side, reduce: str, reshard: bool, last: bool, low: bool) -> Any:
    """Gradients after each of three microbatches, the last of which is reduced."""
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
            # Without resharding torch shows unreduced gradients.
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
    """Reduce-scatters each microbatch, or skips some, and all-reduces the last."""
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
    model.set_requires_gradient_sync(True)  # includes the all-reduce
    loss_of(model, 6, side.rank).backward()
    return [*results, grads(model)]


class CalledAgain(nn.Module):
    """A part of its first unit is called once more after the last one, as the embedding in diffusers' DiT."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(linears(4, 4) for _ in range(2))
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        for part in self.parts:
            x = x + torch.tanh(part(x))
        return self.last(x * self.parts[0][0](x))


@scenario()
def a_part_is_called_after_the_forward_of_its_unit(side):
    """Its gradients are reduced with those of its unit."""
    seed_cpu(0)
    model = CalledAgain().to(DEVICE)
    for i, part in enumerate(model.parts):
        side.fully_shard(part, reshard_after_forward=i > 0)
    side.fully_shard(model)
    return trained(side, model, loss=lambda step: model(inputs(side, step, rows=64)).square().sum())
