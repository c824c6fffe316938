"""FSDP1, gradients accumulated under no_sync, and a unit that the last microbatch does not use.

What the unit has accumulated is not reduced. Under NO_SHARD each rank goes on with its own sum, without a word: replicas part.
Under FULL_SHARD an assertion fails. DDP and FSDP2 reduce it.
"""

import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Model(nn.Module):
    """Two linear layers, of which the first may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        for param in self.parameters():
            nn.init.ones_(param)

    def forward(self, x: Tensor, whole: bool) -> Tensor:
        return self.second(self.first(x) if whole else x)


def shown(rank: int, strategy: str) -> float | str:
    """The gradient of the layer that was left out, on this rank; rank r brings r + 1, so that the average is 1.5."""
    model = FullyShardedDataParallel(
        Model(),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        sharding_strategy=ShardingStrategy[strategy],
        device_id=torch.device("cpu"),
    )
    x = torch.full((1, 1), rank + 1.0)
    try:
        with model.no_sync():
            model(x, True).sum().backward()
        model(x, False).sum().backward()
    except AssertionError as error:
        return str(error)
    left_out: nn.Module = model.module.first  # type: ignore[assignment]
    return next(left_out.parameters()).grad.item()  # type: ignore[union-attr]


def _rank(rank: int, store: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for strategy in ("NO_SHARD", "FULL_SHARD"):
        print(f"{strategy}, rank {rank}: expected 1.5, got {shown(rank, strategy)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (f"{folder}/store",), nprocs=2)  # type: ignore[attr-defined]
