"""Wrapping policies, and `wrap` inside `enable_wrap`."""

import functools

import torch
from torch import nn

from tests.on_torch.fsdp1.scripts import scenario
from tests.on_torch.helpers.device import DEVICE
from tests.on_torch.helpers.fsdp1_models import Nested, trained
from tests.on_torch.helpers.scripts import warned


@scenario("orig")
def wrap_inside_enable_wrap(side):
    p = side.policies
    with p.enable_wrap(
        wrapper_cls=side.FullyShardedDataParallel, device_id=DEVICE, use_orig_params=side.use_orig_params
    ):
        first = p.wrap(nn.Linear(4, 4))
        second = p.wrap(nn.Sequential(nn.Linear(4, 4), p.wrap(nn.Linear(4, 2))), backward_prefetch=None)
    outside = p.wrap(nn.Linear(2, 2))
    model = side.shard(nn.Sequential(first, second))
    return [
        type(first).__name__,
        first.rank,
        second.backward_prefetch,
        type(outside).__name__,
        [name for name, _ in model.named_parameters()],
    ]


@scenario("orig")
def policies_by_type_by_size_and_by_function(side):
    p = side.policies
    found = {}
    for name, policy in {
        "always": p.always_wrap_policy,
        "classes": p.ModuleWrapPolicy({nn.Linear}),
        "size": functools.partial(p.size_based_auto_wrap_policy, min_num_params=20),
        "lambda": functools.partial(p.lambda_auto_wrap_policy, lambda_fn=lambda m: getattr(m, "out_features", 0) == 3),
        "transformer": functools.partial(p.transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear}),
        "custom": p.CustomPolicy(lambda m: {"backward_prefetch": None} if isinstance(m, nn.Linear) else False),
        "leaf": functools.partial(
            p.size_based_auto_wrap_policy,
            min_num_params=1,
            force_leaf_modules={nn.Sequential},
            exclude_wrap_modules=set(),
        ),
    }.items():
        model = side.shard(Nested(), auto_wrap_policy=policy)
        found[name] = [n for n, m in model.named_modules() if isinstance(m, side.FullyShardedDataParallel)]
        found[f"{name} trained"] = trained(side, model, steps=1)
    return found


@scenario("flat")
def batch_norm_under_a_policy_keeps_its_precision(side):
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    told = []

    def wrap():
        told.append(
            side.shard(
                module,
                auto_wrap_policy=side.policies.ModuleWrapPolicy({nn.Linear}),
                mixed_precision=side.MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
            )
        )

    kinds = warned(wrap)
    model = told[0]
    wrappers = side.FullyShardedDataParallel.fsdp_modules(model)
    return [kinds, [w.mixed_precision.param_dtype for w in wrappers], trained(side, model), dict(model.named_buffers())]
