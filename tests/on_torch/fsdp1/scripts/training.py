"""Orders of forward and backward other than one after the other."""

import torch

from tests.on_torch.fsdp1.scripts import scenario
from tests.on_torch.helpers.fsdp1_models import nested, trained
from tests.on_torch.helpers.scripts import grads, inputs, raised


@scenario("flat")
def forward_several_times_before_backward(side):
    results = []
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        model = nested(side, sharding_strategy=side.ShardingStrategy[strategy])
        x, y = inputs(side, 1), inputs(side, 2)
        (model(x).sum() + model(y).square().sum() + model(x).sum()).backward()
        results.append([grads(model), trained(side, model)])
    return results


@scenario("orig")
def forward_without_gradients_and_in_evaluation(side):
    results = []
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        for low in (None, torch.bfloat16):
            model = nested(
                side,
                sharding_strategy=side.ShardingStrategy[strategy],
                mixed_precision=side.MixedPrecision(low),
                forward_prefetch=True,
            )
            x = inputs(side)
            with torch.no_grad():
                before, evaluated = model(x), model.eval()(x)
            results += [before, evaluated, trained(side, model.train())]
            with torch.no_grad():
                results.append(model(x))
    return results


@scenario("flat")
def a_failed_forward_and_then_a_step(side):
    model = nested(side)
    wrong = raised(lambda: model(torch.zeros(3, 9)))
    return [wrong, trained(side, model)]


@scenario("flat")
def a_missing_method(side):
    return [raised(lambda: nested(side).no_such_method())]
