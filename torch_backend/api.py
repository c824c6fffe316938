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
    """Over which ranks parameters are sharded, and when full ones are freed (R14).

    - FULL_SHARD: over all ranks; full parameters live from just before a unit's forward to its end, and again in its backward.
    - SHARD_GRAD_OP: over all ranks; full parameters live from forward to the end of backward.
    - NO_SHARD: every rank keeps everything; gradients are averaged by an all-reduce.
    - HYBRID_SHARD: FULL_SHARD inside groups of ranks (a machine, as a rule), and the groups are replicas of each other.
    - _HYBRID_SHARD_ZERO2: SHARD_GRAD_OP inside such groups.
    """

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()

    @property
    def strategy(self) -> Strategy:
        """The core's name of it."""
        return Strategy[self.name.removeprefix("_")]


class BackwardPrefetch(Enum):
    """When backward gathers the parameters of the unit that comes next (R16).

    - BACKWARD_PRE: before this unit's gradients are computed. Two units are full at a time.
    - BACKWARD_POST: after it, when this unit's parameters have been freed.

    The argument may also be None: then a unit is gathered when it is needed.
    """

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()

    @property
    def prefetch(self) -> Prefetch:
        """The core's name of it."""
        return Prefetch[self.name]


@dataclass
class MixedPrecision:
    """In which dtypes a unit computes, reduces and keeps buffers, while its shards keep full precision (R33, R35).

    With the environment variable FSDP_USE_FULL_PREC_IN_EVAL=1, read when a module is wrapped, a unit whose module is in eval mode
    computes in full precision: parameters are gathered in it and inputs are not cast. Buffers follow the outermost unit's mode.

    Attributes:
        param_dtype: of gathered parameters, and so of forward and backward. None: as stored.
        reduce_dtype: in which gradients are summed between ranks. None: that of `param_dtype`.
        buffer_dtype: of floating buffers, from the first forward on. None: as they are.
        keep_low_precision_grads: leave the sharded gradient in `param_dtype` for the optimizer.
        cast_forward_inputs: cast each unit's floating inputs to `param_dtype`.
        cast_root_forward_inputs: cast those of the outermost unit, whatever `cast_forward_inputs` says.
        _module_classes_to_ignore: with `auto_wrap_policy`, modules of these classes become units of their own in full
            precision; batch norm by default.
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
        """The core's form of it.

        Raises:
            ParamError: a dtype in which nothing can be trained.
            PlanError: a choice that is no bool.
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
    """Where shards live between steps.

    Attributes:
        offload_params: on the CPU, and with them gradients and what the optimizer keeps; a unit's parameters are copied to
            the device when they are gathered.
    """

    offload_params: bool = False


class TrainingState(Enum):
    """What a unit is in the middle of, as torch's FSDP1 names it (R12)."""

    IDLE = auto()
    FORWARD_BACKWARD = auto()
    SUMMON_FULL_PARAMS = auto()
