"""DDP with static_graph=True, and gradients accumulated under no_sync from the first step on: an internal assertion fails.

Known: pytorch/pytorch#143580.
"""

import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def shown(rank: int, static_graph: bool, first: str) -> list[float] | str:
    """The gradients of three steps of two microbatches, to which rank r brings r + 1 twice, so that the average is 3.

    Args:
        first: "two": the first step is as the others; "one": it has one microbatch, so that its average is 1.5.
    """
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False), static_graph=static_graph)
    x, found = torch.full((1, 1), rank + 1.0), []
    try:
        for step in range(3):
            if step or first == "two":
                with model.no_sync():
                    model(x).sum().backward()
            model(x).sum().backward()
            found.append(model.module.weight.grad.item())
            model.zero_grad()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return found


def _rank(rank: int, store: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for static_graph in (False, True):
        for first, expected in (("one", [1.5, 3.0, 3.0]), ("two", [3.0, 3.0, 3.0])):
            got = shown(rank, static_graph, first)
            print(f"static_graph={static_graph}, rank {rank}: expected {expected}, got {got}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (f"{folder}/store",), nprocs=2)  # type: ignore[attr-defined]
