"""FSDP1's clip_grad_norm_ on a model in float64: it takes norms in float32, and the kernel refuses to narrow.

torch.nn.utils.clip_grad_norm_ has no such trouble, but knows nothing of the other ranks' shards of FSDP1.
"""

import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def shown(rank: int, dtype: torch.dtype) -> float | str:
    """The norm of the gradient of six weights, each of which is 1."""
    model = FullyShardedDataParallel(nn.Linear(2, 3, bias=False).to(dtype), device_id=torch.device("cpu"))
    model(torch.ones(1, 2, dtype=dtype)).sum().backward()
    try:
        return model.clip_grad_norm_(1.0).item()
    except RuntimeError as error:
        return str(error)


def _rank(rank: int, store: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for dtype in (torch.float32, torch.float64):
        print(f"{dtype}, rank {rank}: expected 2.449..., got {shown(rank, dtype)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (f"{folder}/store",), nprocs=2)  # type: ignore[attr-defined]
