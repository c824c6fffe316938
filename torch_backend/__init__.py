"""FSDP in torch, over crossframe's core: put it in the place of torch.distributed.fsdp."""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("torch_backend needs torch: pip install 'crossframe[torch]'") from error

from torch_backend.fully_shard import FSDPModule, UnshardHandle, fully_shard
from torch_backend.fully_sharded_data_parallel import (
    BackwardPrefetch,
    CPUOffload,
    FlatParameter,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch_backend.wrap import ModuleWrapPolicy

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FSDPModule",
    "FlatParameter",
    "FullyShardedDataParallel",
    "MixedPrecision",
    "ModuleWrapPolicy",
    "ShardingStrategy",
    "UnshardHandle",
    "fully_shard",
]
