"""Models that raise on one rank, and what the others say of it."""

from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

import torch_backend
from crossframe.errors import CrossframeError
from tests.on_torch.helpers.models import Net, loss_of
from torch_backend.observe import Observer
from torch_backend.ranks import _consensus as rounds
from torch_backend.ranks import _desync as position
from torch_backend.ranks import _failure as failure


def message_of(fn):
    """What a rank was told. One that is told nothing hangs: the group's timeout is far above what `ranks.run` waits."""
    try:
        fn()
    except CrossframeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was wrong"


@contextmanager
def impatient(seconds=0.2):
    """Inside, this rank looks where the others are after a part of a second, instead of after one."""
    before = failure._LOOK_EVERY, rounds._PATIENCE_SECONDS, position._PATIENCE_SECONDS
    failure._LOOK_EVERY = timedelta(seconds=seconds)
    rounds._PATIENCE_SECONDS = position._PATIENCE_SECONDS = seconds
    try:
        yield
    finally:
        failure._LOOK_EVERY, rounds._PATIENCE_SECONDS, position._PATIENCE_SECONDS = before


def changed_net(**changes):
    torch.manual_seed(3)
    net: Any = Net(**{"depth": 2, "width": 7, **{k: v for k, v in changes.items() if k in ("depth", "width", "tied")}})
    if changes.get("double"):
        net.blocks[1].double()
    if changes.get("frozen"):
        net.blocks[0].norm.bias.requires_grad_(False)
    if changes.get("swapped"):
        net.blocks[0].up, net.blocks[0].down = net.blocks[0].down, net.blocks[0].up
        net.blocks[0]._modules["down"], net.blocks[0]._modules["up"] = (
            net.blocks[0]._modules.pop("up"),
            net.blocks[0]._modules.pop("down"),
        )
    return net


def fsdp2_net(net, **settings):
    for block in net.blocks:
        torch_backend.fully_shard(block, **settings)
    return torch_backend.fully_shard(net)


class Raises(Observer):
    """Raises when the nth collective is about to be issued."""

    def __init__(self, nth):
        self.left = nth

    def event(self, event):
        self.left -= event.kind != "free"
        if self.left == 0:
            self.left = -1
            raise Boom


def train_step(model, optimizer, step, rank):
    optimizer.zero_grad()
    loss = loss_of(model, step, rank)
    loss.backward()
    optimizer.step()
    return loss.item()


def local_values(tensor):
    return getattr(tensor, "_local_tensor", tensor).detach().clone()


def state_of(model, optimizer):
    held = [local_values(p) for p in model.parameters()] + [
        local_values(p.grad) for p in model.parameters() if p.grad is not None
    ]
    return held + [local_values(v) for state in optimizer.state.values() for v in state.values()]


class Boom(Exception):
    """What a rank that raises dies of."""
