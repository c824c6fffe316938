"""FSDP1, HYBRID_SHARD on a mesh whose shards are of one rank: two replicas.

It turns itself into NO_SHARD, as one rank has nothing to shard. Its gradients are then divided by the number of all ranks, but
summed over the shards' group alone: that one rank. So they are too small by that number, and replicas part. FSDP2 averages on the
same mesh.
"""

import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard


def shown(rank: int, api: str) -> float:
    """The gradient to which rank r brings r + 1, so that the average is 1.5."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    if api == "FSDP1":
        model = FullyShardedDataParallel(
            nn.Linear(1, 1, bias=False),
            device_mesh=mesh,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            device_id=torch.device("cpu"),
        )
    else:
        model = nn.Linear(1, 1, bias=False)
        fully_shard(model, mesh=mesh)
    model(torch.full((1, 1), rank + 1.0)).sum().backward()
    grad = next(model.parameters()).grad
    return (grad if api == "FSDP1" else grad.to_local()).item()  # type: ignore[union-attr]


def _rank(rank: int, store: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for api in ("FSDP1", "FSDP2"):
        print(f"{api}, rank {rank}: expected 1.5, got {shown(rank, api)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (f"{folder}/store",), nprocs=2)  # type: ignore[attr-defined]
