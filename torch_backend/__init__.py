"""FSDP for PyTorch on the rules of crossframe: a replacement for torch.distributed.fsdp."""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("torch_backend needs torch: pip install 'crossframe[torch]'") from error

from torch_backend.check_ranks import check_ranks
from torch_backend.checkpoint import load_checkpoint, save_checkpoint
from torch_backend.compat._fully_shard_api import (
    AllGather,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ReduceScatter,
)
from torch_backend.engine._deferred_init import initialise_sharded
from torch_backend.fsdp2._fsdp_module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from torch_backend.fully_shard import fully_shard
from torch_backend.fully_sharded_data_parallel import (
    BackwardPrefetch,
    CPUOffload,
    FlatParameter,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch_backend.pieces._piece_tensor import PieceTensor
from torch_backend.replace_torch_fsdp import replace_torch_fsdp
from torch_backend.state._state_dict_types import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch_backend.wrap import ModuleWrapPolicy

__all__ = [
    "AllGather",
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "ModuleWrapPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "PieceTensor",
    "ReduceScatter",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "UnshardHandle",
    "check_ranks",
    "fully_shard",
    "initialise_sharded",
    "load_checkpoint",
    "register_fsdp_forward_method",
    "replace_torch_fsdp",
    "save_checkpoint",
    "share_comm_ctx",
]
