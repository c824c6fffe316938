"""Every collective of the engine, under the names of the core, and the trace of them.

The only file that calls torch.distributed's collectives. torch 2.13 gave two of them new names and warns about the old ones,
which 2.11 alone has.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from crossframe.trace import ALL_GATHER, REDUCE_SCATTER, Event
from torch_backend.observe import observers

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Done:
    """What stands for the work of a collective between no one: a rank alone in its group copies (R14)."""

    def wait(self) -> bool:
        """It is over."""
        return True


Work = dist.Work | Done
"""What was issued and may be waited for."""


class Communicator:
    """The ranks that one unit is sharded over, and the collectives between them.

    Attributes:
        rank, size: this process's place in the group, and the size of the group.
        ranks: the group's ranks in the world.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.ranks = tuple(dist.get_process_group_ranks(group))

    def all_gather(self, gathered: Tensor, shard: Tensor, *, unit: str, phase: str) -> Work:
        """Start filling `gathered` (size * n elements) with the `shard`s (n elements) of all ranks, in rank order."""
        if self.size == 1:
            gathered.copy_(shard)
            return Done()
        self._tell(ALL_GATHER, gathered, unit, phase)
        return _all_gather(gathered, shard, group=self.group, async_op=True)

    def reduce_scatter(self, shard: Tensor, full: Tensor, *, unit: str, phase: str) -> Work:
        """Start summing the `full`s (size * n elements) of all ranks; this rank's n elements of it arrive in `shard`."""
        if self.size == 1:
            shard.copy_(full)
            return Done()
        self._tell(REDUCE_SCATTER, full, unit, phase)
        return _reduce_scatter(shard, full, group=self.group, async_op=True)

    def _tell(self, kind: str, unsharded: Tensor, unit: str, phase: str) -> None:
        if observers:
            event = Event(kind, unit, phase, dtype_name(unsharded.dtype), unsharded.nbytes, self.ranks)
            for observer in observers:
                observer.event(event)


def dtype_name(dtype: torch.dtype) -> str:
    """The core's name of a torch dtype.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")
