"""Where `torch_backend.fully_shard` departs from torch on purpose: the smallest case of each, run with both.

`python -m experiments.spec.departures` prints them all; each module here prints its own. A case runs on two or four processes
on the CPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch._dynamo  # torch's FSDP imports it when it is first used: once here, not in every process
import torch.distributed.fsdp

import torch_backend
from experiments.teach.ranks import on_ranks


@dataclass(frozen=True)
class Departure:
    """One rule, what is asked, and what comes of it.

    Attributes:
        rule: its number.
        asked: the case in words.
        right: what it must come to.
        theirs, ours: what it comes to with torch.distributed.fsdp and with torch_backend.
    """

    rule: str
    asked: str
    right: Any
    theirs: Any
    ours: Any

    def __str__(self) -> str:
        """Four lines."""
        lines = (("right", self.right), ("torch", self.theirs), ("ours", self.ours))
        return "\n".join([f"{self.rule}  {self.asked}", *(f"     {who:6}{what}" for who, what in lines)])


def depart(
    rule: str, asked: str, world_size: int, work: Callable[[ModuleType, int], Any], right: Sequence[Any]
) -> Departure:
    """The case run with both packages.

    Args:
        world_size: how many processes.
        work: from one of the packages and a rank to what this rank sees.
        right: what each rank must see, in rank order.
    """
    theirs = on_ranks(world_size, lambda rank: work(torch.distributed.fsdp, rank))
    ours = on_ranks(world_size, lambda rank: work(torch_backend, rank))
    return Departure(rule, asked, *map(_short, (right, theirs, ours)))


def _short(seen: Sequence[Any]) -> Any:
    """What all ranks see, said once; else what each sees."""
    return seen[0] if all(each == seen[0] for each in seen) else list(seen)
