"""Models for scripts that use FullyShardedDataParallel, torch's and ours."""

import dataclasses
import functools
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.on_torch.helpers import scripts
from tests.on_torch.helpers.device import DEVICE
from tests.on_torch.helpers.scripts import inputs


@dataclasses.dataclass(frozen=True)
class Side(scripts.Side):
    """One of the two implementations of FSDP1, in one rank."""

    use_orig_params: bool

    @property
    def policies(self) -> Any:
        """The module of wrapping policies."""
        return import_module(f"{self.name}.wrap")

    def shard(self, module: nn.Module, **options: Any) -> Any:
        """The wrapped module; torch computes on the CPU only with an explicit `device_id`."""
        return self.FullyShardedDataParallel(
            module, **{"device_id": DEVICE, "use_orig_params": self.use_orig_params} | options
        )

    def full(self, model: nn.Module) -> dict[str, Tensor]:
        """All parameters in full."""
        with self.FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return {name: param.detach().clone() for name, param in model.named_parameters()}


class Nested(nn.Module):
    """Linears on two levels, as `nested` wraps them: the first and the last belong to the root."""

    def __init__(self, side: Side | None = None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        wrap = (lambda module: module) if side is None else functools.partial(side.shard, **options)
        self.layers = nn.Sequential(
            nn.Linear(4, 3),
            wrap(nn.Sequential(wrap(nn.Linear(3, 5)), nn.Linear(5, 5))),
            wrap(nn.Linear(5, 3)),
            nn.Linear(3, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class OneRankGroup:
    """The object that PyTorch's own tests pass instead of a process group: it has a rank and a size."""

    def rank(self) -> int:
        """The rank of this process."""
        return 0

    def size(self) -> int:
        """The number of ranks in the group."""
        return 1


def nested(side: Side, **options: Any) -> Any:
    """The nested model, wrapped without a policy."""
    return side.shard(Nested(side, **options), **options)


def world() -> dist.ProcessGroup:
    """The default process group."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def sgd(model: Any) -> torch.optim.Optimizer:
    """The optimizer of `trained`."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained(
    side: Side, model: Any, steps: int = 2, width: int = 4, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Losses, and full parameters after some steps."""
    optimizer = optimizer or sgd(model)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        output = model(inputs(side, step, width))
        loss = output.float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": losses, **side.full(model)}
