"""Units of several modules."""

# pyright: reportCallIssue=false

from typing import Any

import torch
from torch import Tensor, nn

from tests.on_torch.fsdp2.scripts import refusal, scenario
from tests.on_torch.helpers.fsdp2_models import linears, look, trained, trained_linears
from tests.on_torch.helpers.models import build_net, seed_cpu
from tests.on_torch.helpers.scripts import Side, counting_collectives, grads, inputs


@scenario()
def shared_parameters_in_a_list(side):
    """Parameters shared between modules of one unit."""
    model = build_net(depth=1, tied=True)
    side.fully_shard([model.embedding, model.head])
    results = trained(side, side.fully_shard(model))
    return [results, model.head.weight is model.embedding.weight, look(model)]


class Heads(nn.Module):
    """An embedding and a body in one unit, a norm and a head in another."""

    def __init__(self) -> None:
        super().__init__()
        seed_cpu(10)
        self.embedding, self.body = nn.Linear(4, 5), nn.Linear(5, 5)
        self.norm, self.head = nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, x: Tensor, chunks: bool = False) -> Tensor:
        hidden = self.norm(torch.tanh(self.body(self.embedding(x))))
        return hidden if chunks else self.head(hidden)


def grouped(side: Side, **options: Any) -> Heads:
    """A model with two units of several modules."""
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
        trained_linears(side, model),
        [model.norm.unshard(), look(model), model.head.reshard(), look(model)],
    ]


@scenario()
def grouped_modules_train(side):
    results = []
    for reshard in (True, False):
        model = grouped(side, reshard_after_forward=reshard)
        results += [trained_linears(side, model, 3), look(model)]
    return results


@scenario(needs="reset_iter_state")  # added in the same version of torch
def a_forward_of_a_part_of_a_list(side):
    """Neither forward nor backward uses the head."""
    model = grouped(side)
    results = []
    for step in range(2):
        model(inputs(side, step), chunks=True).square().sum().backward()
        results += [look(model), grads(model)]
    return [results, trained_linears(side, model)]


@scenario(needs="reset_iter_state")  # added in the same version of torch
def a_loss_in_chunks(side):
    """The head runs on each chunk of the hidden states, after a forward without it."""
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


@scenario(needs="reset_iter_state")  # added in the same version of torch
def a_loss_in_chunks_where_unused_parameters_count_as_zeros(side):
    """The backward of a chunk reduces nothing of the units that the last backward reaches, and all steps do the same."""
    model = grouped(side)
    model.set_reduce_scatter_unused_params(True)
    results = []
    for step in range(2):
        hidden = model(inputs(side, step), chunks=True)
        leaf = hidden.detach().requires_grad_()
        for part in leaf.chunk(3):
            with counting_collectives() as counts:
                model.head(part).square().sum().backward()
            results.append(counts["red"])
        with counting_collectives() as counts:
            hidden.backward(leaf.grad)
        results += [counts["red"], grads(model)]
        model.zero_grad()
    return results


@scenario(needs="reset_iter_state")  # added in the same version of torch
def grouped_modules_in_low_precision(side):
    policy = side.MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    model = grouped(side, mp_policy=policy)
    hidden = model(inputs(side), chunks=True)
    return [hidden.dtype, model.head(hidden).dtype, trained_linears(side, grouped(side, mp_policy=policy))]


@refusal()
def a_list_as_the_root(side):
    model = linears(4, 3, 2)
    side.fully_shard(list(model))
    model(inputs(side))
