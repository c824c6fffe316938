"""Modules on the meta device, of which only a part is."""

import torch
from torch import nn

from torch_backend import FullyShardedDataParallel


class Adapted(nn.Module):
    """A weight on the meta device, and one with values."""

    def __init__(self):
        super().__init__()
        self.base = nn.Parameter(torch.full((3,), 7.0), requires_grad=False)
        self.added = nn.Parameter(torch.empty(4, device="meta"))

    def reset_parameters(self):
        for param in self.parameters():
            nn.init.ones_(param)

    def forward(self, x):
        return x * self.base.sum() * self.added.sum()


def _materialised(rank, world_size):
    module = Adapted()
    base = module.base
    model = FullyShardedDataParallel(module, ignored_states=[base])
    return base is module.base, base.detach().clone(), model(torch.ones(1)).item()


def test_ignored_parameters_keep_their_values(ranks):
    """Beside others of their module that are initialised. (Under torch they lose them.)"""
    for same, base, result in ranks.run(2, _materialised):
        assert same and torch.equal(base, torch.full((3,), 7.0)) and result == 7 * 3 * 4
