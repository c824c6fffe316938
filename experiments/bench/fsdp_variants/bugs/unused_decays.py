"""FSDP1, and a parameter that no rank ever uses, inside of a unit that is used.

The unit has one flat gradient, so that this parameter's is zeros and not None. AdamW decays it, which it does not do on one
device, with DDP or with FSDP2. No fault in a sum, but another training.
"""

import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    """A weight that is used and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.ones(2))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.used).sum()


def shown(api: str) -> float:
    """The unused weight after ten steps of AdamW with a decay of 0.1: it was 1."""
    model = Model()
    wrapped: nn.Module = model
    if api == "FSDP1":
        wrapped = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    elif api == "FSDP2":
        fully_shard(model)
    else:
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(10):
        wrapped(torch.ones(2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if api == "FSDP1":
        with FullyShardedDataParallel.summon_full_params(wrapped):
            return model.unused[0].item()
    return (model.unused.full_tensor() if api == "FSDP2" else model.unused)[0].item()  # type: ignore[operator]


def _rank(rank: int, store: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for api in ("DDP", "FSDP2", "FSDP1"):
        print(f"{api}, rank {rank}: expected 1.0, got {shown(api):.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (f"{folder}/store",), nprocs=2)  # type: ignore[attr-defined]
