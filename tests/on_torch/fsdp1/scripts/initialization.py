"""Parameters on meta, `apply`, and values that the first rank sends."""

import warnings

import torch
from torch import nn

from tests.on_torch.fsdp1.scripts import scenario
from tests.on_torch.helpers.device import DEVICE
from tests.on_torch.helpers.fsdp1_models import nested, trained
from tests.on_torch.helpers.scripts import raised


@scenario()
def a_model_on_meta(side):
    results = []
    for fn in (None, _init):
        with torch.device("meta"):
            module = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)))
        torch.manual_seed(7)
        model = side.shard(module, param_init_fn=fn, auto_wrap_policy=side.policies.ModuleWrapPolicy({nn.Sequential}))
        shapes = {name: tuple(value.shape) for name, value in side.full(model).items()}
        results.append([shapes, trained(side, model) if fn else None])
    return results


def _init(module: nn.Module) -> None:
    module.to_empty(device=DEVICE, recurse=False)
    with torch.no_grad():
        for i, param in enumerate(module.parameters(recurse=False)):
            param.copy_(torch.arange(param.numel()).view_as(param) / 10 + i)


@scenario("orig")
def a_module_on_meta_that_cannot_be_reset(side):
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, device="meta"))

    caught = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        caught.append(raised(lambda: side.shard(Bare())))
    return [caught[0] is not None]


@scenario()
def apply_sees_full_parameters(side):
    model = nested(side)
    seen = []

    @torch.no_grad()
    def fill(module):
        if isinstance(module, nn.Linear):
            seen.append(tuple(module.weight.shape))
            module.weight.copy_(torch.arange(module.weight.numel()).view_as(module.weight) / 50)

    returned = model.apply(fill)
    return [sorted(seen), side.full(model), returned is model, trained(side, model)]


@scenario("flat")
def apply_while_summoned_is_refused(side):
    model = nested(side)
    with side.FullyShardedDataParallel.summon_full_params(model):
        return [raised(lambda: model.apply(lambda module: None))]


@scenario()
def states_of_the_first_rank(side):
    def build(seed):
        torch.manual_seed(seed)
        norm = nn.BatchNorm1d(4)
        norm.register_buffer("running_mean", torch.full((4,), float(seed)))
        return nn.Sequential(nn.Linear(4, 4), norm)

    try:
        model = side.shard(build(side.rank), sync_module_states=True)
    except ValueError:  # torch does not support sync_module_states on the CPU
        model = side.shard(build(0))
    return [side.full(model), dict(model.named_buffers()), trained(side, model)]
