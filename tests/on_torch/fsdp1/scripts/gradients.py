"""Accumulation, `no_sync`, and gradients of gradients."""

import contextlib

import torch
from torch import nn

from tests.on_torch.fsdp1.scripts import scenario
from tests.on_torch.helpers.fsdp1_models import nested, trained
from tests.on_torch.helpers.scripts import grads, inputs, raised


@scenario()
def accumulation_with_and_without_no_sync(side):
    results = []
    for turns in ((True, True, False), (True, False), (False, False), (False, True, False)):
        model = nested(side)
        for i, silent in enumerate(turns):
            with model.no_sync() if silent else contextlib.nullcontext():
                model(inputs(side, i)).square().sum().backward()
        results.append([grads(model), trained(side, model)])
    return results


@scenario("orig")
def gradients_of_gradients_are_refused(side):
    return [
        raised(lambda: nested(side)(inputs(side)).square().sum().backward(create_graph=True)),
        raised(
            lambda: (
                nested(side, sharding_strategy=side.ShardingStrategy.NO_SHARD)(inputs(side))
                .square()
                .sum()
                .backward(create_graph=True)
            )
        ),
    ]


@scenario(differs="torch raises a RuntimeError; ours allows it")
def no_sync_of_an_inner_unit(side):
    model = nested(side)
    model(inputs(side)).sum().backward()

    def enter():
        with model.module.layers[2].no_sync():
            pass

    return [raised(enter)]


@scenario(differs="torch shows the gradients that are not reduced yet")
def gradients_under_no_sync(side):
    """Gradients before and after they are reduced."""
    results = []
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        for low in (None, torch.bfloat16):
            precision = side.MixedPrecision(low, reduce_dtype=torch.float32)
            model = side.shard(
                nn.Linear(4, 2), mixed_precision=precision, sharding_strategy=side.ShardingStrategy[strategy]
            )
            with model.no_sync():
                for seed in range(2):
                    model(inputs(side, seed)).float().sum().backward()
                    seen = [p.grad for p in model.parameters()]
                    results.append([None if grad is None else (grad.dtype, tuple(grad.shape)) for grad in seen])
            model(inputs(side)).float().sum().backward()
            results.append(grads(model))
    return results
