"""Options of FullyShardedDataParallel under torch's names: sharding strategy, prefetch, precision, offload, state dict types."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from crossframe.precision import PrecisionPolicy
from crossframe.strategy import Prefetch, Strategy
from torch_backend.compat._dtypes import name_or_none
from torch_backend.state._state_dict_types import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "TrainingState",
]


class ShardingStrategy(Enum):
    """The ranks over which parameters are sharded, and when unsharded parameters are freed (R14).

    - FULL_SHARD: shards over all ranks; unsharded parameters exist during a unit's forward and again during its backward.
    - SHARD_GRAD_OP: shards over all ranks; unsharded parameters exist from forward until the end of backward.
    - NO_SHARD: every rank keeps all parameters; gradients are all-reduced.
    - HYBRID_SHARD: FULL_SHARD within groups of ranks (usually one machine) that are replicas of each other.
    - _HYBRID_SHARD_ZERO2: SHARD_GRAD_OP within such groups.
    """

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()

    @property
    def strategy(self) -> Strategy:
        """The equivalent value of the core."""
        return Strategy[self.name.removeprefix("_")]


class BackwardPrefetch(Enum):
    """When backward all-gathers the parameters of the next unit (R16).

    - BACKWARD_PRE: before this unit's gradients are computed. Two units are unsharded at a time.
    - BACKWARD_POST: after this unit's parameters are freed.

    None instead of a member disables prefetching.
    """

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()

    @property
    def prefetch(self) -> Prefetch:
        """The equivalent value of the core."""
        return Prefetch[self.name]


@dataclass
class MixedPrecision:
    """The dtypes of a unit's computation, reduction and buffers. Sharded parameters keep full precision (R33, R35).

    With the environment variable FSDP_USE_FULL_PREC_IN_EVAL=1, read when a module is wrapped, units whose module is in eval mode
    compute in full precision: parameters are all-gathered in it and inputs are not cast. Buffers follow the mode of the outermost
    unit.

    Attributes:
        param_dtype: dtype of unsharded parameters, and so of forward and backward. None: as stored.
        reduce_dtype: dtype of gradient reduction. None: `param_dtype`.
        buffer_dtype: dtype of floating-point buffers from the first forward on. None: unchanged.
        keep_low_precision_grads: keep sharded gradients in `param_dtype` for the optimizer.
        cast_forward_inputs: cast each unit's floating-point inputs to `param_dtype`.
        cast_root_forward_inputs: cast the inputs of the outermost unit, independent of `cast_forward_inputs`.
        _module_classes_to_ignore: with `auto_wrap_policy`, modules of these classes become separate units in full precision;
            batch norm by default.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (_BatchNorm,)

    @property
    def policy(self) -> PrecisionPolicy:
        """The equivalent PrecisionPolicy.

        Raises:
            ParamError: a dtype that is not trainable.
            PlanError: a choice that is not a bool.
        """
        return PrecisionPolicy(
            name_or_none(self.param_dtype),
            name_or_none(self.reduce_dtype),
            name_or_none(self.buffer_dtype),
            keep_low_precision_grads=self.keep_low_precision_grads,
            cast_forward_inputs=self.cast_forward_inputs,
            cast_root_forward_inputs=self.cast_root_forward_inputs,
        )


@dataclass
class CPUOffload:
    """CPU offloading.

    Attributes:
        offload_params: keep sharded parameters, their gradients and optimizer states on the CPU; parameters are copied to the
            device for the all-gather.
    """

    offload_params: bool = False


class TrainingState(Enum):
    """The training state of a unit, with the names of PyTorch's FSDP1 (R12)."""

    IDLE = auto()
    FORWARD_BACKWARD = auto()
    SUMMON_FULL_PARAMS = auto()
