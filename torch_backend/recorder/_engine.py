"""`Engine`: how a library shards a model over ranks, in the terms of the recorder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from crossframe.layout import Layout
from crossframe.strategy import Strategy
from torch_backend.recorder._model_ranks import ModelRanks
from torch_backend.recorder._partition import Partition, Pieces
from torch_backend.recorder._unit_meshes import Place

Registered = tuple[nn.Module, str]
"""A module and an attribute, which yields a parameter."""


@dataclass(frozen=True)
class Bucket:
    """Parameters that lie together.

    Attributes:
        modules: the names of the unit's modules, on whose entry its parameters can be read in full.
        params: what the optimizer has: one parameter each in the layout's order, or one flat parameter.
        places: of each parameter the modules and attributes that forward reads.
        is_flat: whether `params` is one flat parameter, this rank's shard.
        shards: the ranks that have pieces of parameters that are no DTensors; None: this rank alone.
        ranges: which elements the engine itself says are here, where it does; None where it says nothing.
        specs: of each parameter that of the DTensor of which it is the local part, None of the others; empty: there are none.
    """

    unit: str
    modules: Sequence[str]
    layout: Layout
    params: Sequence[Tensor]
    places: Sequence[Sequence[Registered]]
    is_flat: bool = False
    shards: dist.ProcessGroup | None = None
    ranges: Sequence[tuple[int, int]] | None = None
    specs: Sequence[Any] = ()


@dataclass(frozen=True)
class Engine:
    """What shards a model.

    Attributes:
        name: in words.
        place: of this rank among the data-parallel ranks.
        reads_all_at_once: whether all parameters can be read when the model begins, and not unit by unit.
        compute_dtype: None: that of the parameters.
        names: of our engine: its own names of parameters, and ours. It knows them once the root has run.
        is_gathered: whether full parameters are gathered to be recorded, since ranks with one batch have parts of them, or since
            units have different meshes or are sharded on other dims than the first.
        expert_axes: those of the place's axes over which experts alone are divided, so that ranks may have other batches.
        partitions: of parameters that are divided without DTensors, or into pieces.
        left_out: by name why a parameter cannot be recorded.
        model_ranks: the ranks that compute this replica together; None: this rank alone.
        tensor_ranks: those of them that have the same positions of sequences; None: this rank alone.
    """

    name: str
    strategy: Strategy
    place: Place
    buckets: Sequence[Bucket]
    reads_all_at_once: bool = False
    compute_dtype: str | None = None
    names: Callable[[], dict[str, str]] | None = None
    is_gathered: bool = False
    expert_axes: frozenset[str] = frozenset()
    partitions: Mapping[str, Partition | Pieces] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    model_ranks: ModelRanks | None = None
    tensor_ranks: ModelRanks | None = None


def strategy_of(shard: int, replicate: int, *, keeps: bool) -> Strategy:
    if shard == 1:
        return Strategy.NO_SHARD
    if replicate > 1:
        return Strategy.HYBRID_SHARD_ZERO2 if keeps else Strategy.HYBRID_SHARD
    return Strategy.SHARD_GRAD_OP if keeps else Strategy.FULL_SHARD
