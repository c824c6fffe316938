"""`Engine`: how a library shards a model over ranks, in the recorder's terms."""

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
        params: the tensors of the optimizer: one for each parameter in the layout's order, or one flat parameter.
        places: the registrations of each parameter, where forward reads it.
        is_flat: whether `params` is one flat parameter, this rank's shard.
        shards: the ranks that have pieces of parameters that are not DTensors; None: this rank alone.
        ranges: the elements on this rank as the engine states them; None: it does not.
        specs: for each parameter that is the local part of a DTensor, the spec of the DTensor, else None; empty: there are none.
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
    """How a model is sharded.

    Attributes:
        name: the library and its API, in words.
        place: of this rank among the data-parallel ranks.
        reads_all_at_once: whether all parameters can be read when the model begins, and not unit by unit.
        compute_dtype: None: that of the parameters.
        names: for our engine, maps its names of parameters to canonical ones; known once the root has run. None: another engine.
        is_gathered: whether full parameters are gathered to be recorded, since ranks with one batch have parts of them, or since
            units have different meshes or are sharded on other dims than the first.
        expert_axes: those of the place's axes over which experts alone are divided, so that ranks may have other batches.
        partitions: how ranks divide parameters without DTensors, or into pieces.
        left_out: why a parameter cannot be recorded, by name.
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
