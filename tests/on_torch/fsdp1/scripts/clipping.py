"""`clip_grad_norm_`."""

import torch

from tests.on_torch.fsdp1.scripts import scenario
from tests.on_torch.helpers.fsdp1_models import nested
from tests.on_torch.helpers.fsdp2_models import hybrid_mesh
from tests.on_torch.helpers.scripts import grads, inputs, raised, warned


@scenario()
def clipping_by_several_norms(side):
    results = []
    for norm_type in (1, 2, 2.5, float("inf"), "inf"):
        for max_norm in (0.01, 100):
            model = nested(side)
            model(inputs(side)).square().sum().backward()
            results += [model.clip_grad_norm_(max_norm, norm_type=norm_type), grads(model)]
    return results


@scenario("flat")
def clipping_an_inner_unit_is_refused(side):
    model = nested(side)
    model(inputs(side)).sum().backward()
    return [raised(lambda: model.module.layers[1].clip_grad_norm_(1.0))]


@scenario(differs="torch warns on a rank without gradients")
def clipping_without_gradients(side):
    model = nested(side)
    model(inputs(side))
    norms = []
    kinds = warned(lambda: norms.append(model.clip_grad_norm_(1.0)))
    return [norms[0], kinds]


@scenario()
def clipping_gradients_that_stay_in_low_precision(side):
    results = []
    for keep in (False, True):
        precision = side.MixedPrecision(torch.bfloat16, torch.bfloat16, keep_low_precision_grads=keep)
        model = nested(side, mixed_precision=precision)
        model(inputs(side)).float().square().sum().backward()
        results += [model.clip_grad_norm_(0.1), grads(model)]
    return results


@scenario()
def clipping_copies_that_the_script_made_wider(side):
    """Parameters in bfloat16, which a script updates in float32 by hand."""
    model = nested(side).bfloat16()
    model(inputs(side).bfloat16()).float().square().sum().backward()
    for param in model.parameters():
        if param.grad is not None:
            wide = param.data.float(), param.grad.float()
            param.data, param.grad = wide
    return [model.clip_grad_norm_(0.1), grads(model)]


@scenario("orig", num_ranks=4)
def clipping_under_hybrid_sharding(side):
    """The norm counts each of two replicas once."""
    results = []
    for name in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        model = nested(side, device_mesh=hybrid_mesh(), sharding_strategy=side.ShardingStrategy[name])
        model(inputs(side)).square().sum().backward()
        results += [model.clip_grad_norm_(0.1), grads(model)]
    return results
