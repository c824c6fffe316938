"""Activation checkpointing."""

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from tests.on_torch.fsdp1.scripts import scenario
from tests.on_torch.helpers.fsdp1_models import sgd, trained


@scenario("flat")
def activations_that_are_computed_again(side):
    results = {}
    for reentrant in (True, False):

        class Again(nn.Module):
            def __init__(self, inside, reentrant=reentrant):
                super().__init__()
                self.inside, self.reentrant = inside, reentrant

            def forward(self, x):
                return checkpoint(self.inside, x, use_reentrant=self.reentrant)

        torch.manual_seed(6)
        inner = side.shard(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        results[f"around {reentrant}"] = trained(side, side.shard(nn.Sequential(nn.Linear(4, 4), Again(inner))))
        torch.manual_seed(6)
        inner = side.shard(Again(nn.Sequential(nn.Linear(4, 4), nn.ReLU())))
        results[f"inside {reentrant}"] = trained(side, side.shard(nn.Sequential(nn.Linear(4, 4), inner)))
    torch.manual_seed(6)
    inner = side.shard(checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4), nn.ReLU())))
    model = side.shard(nn.Sequential(nn.Linear(4, 4), inner))
    results["wrapper"] = [trained(side, model), [name for name, _ in model.named_parameters()]]
    return results


@scenario("flat")
def checkpointing_is_applied_after_wrapping(side):
    torch.manual_seed(9)
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    policy = side.policies.ModuleWrapPolicy({nn.Sequential})
    model = side.shard(module, auto_wrap_policy=policy)
    optimizer = sgd(model)
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, nn.Sequential) and m is not module)
    return [trained(side, model, optimizer=optimizer), [name for name, _ in model.named_parameters()]]
