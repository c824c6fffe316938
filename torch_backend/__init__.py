"""FSDP in torch, over crossframe's core: put it in the place of torch.distributed.fsdp."""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("torch_backend needs torch: pip install 'crossframe[torch]'") from error

from torch_backend.fully_shard import FSDPModule, UnshardHandle, fully_shard
from torch_backend.fully_sharded_data_parallel import (
    BackwardPrefetch,
    FlatParameter,
    FullyShardedDataParallel,
    ShardingStrategy,
)
from torch_backend.wrap import ModuleWrapPolicy

__all__ = [
    "BackwardPrefetch",
    "FSDPModule",
    "FlatParameter",
    "FullyShardedDataParallel",
    "ModuleWrapPolicy",
    "ShardingStrategy",
    "UnshardHandle",
    "fully_shard",
]
