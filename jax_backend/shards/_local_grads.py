"""Gradients of each rank's own, before any reduction: what accumulates over microbatches that reduce nothing (R15)."""

from dataclasses import dataclass, field
from typing import Any

import jax

from crossframe.errors import UsageError
from jax_backend.shards._param_tree import ParamTree


@dataclass(frozen=True)
class LocalGrads:
    """Every rank's own gradient of all it trains, in full: of another type than ShardedParams, since no optimizer may see it.

    They are added by `+`, and given to a step as `accumulated`, which reduces them with its own.

    Attributes:
        lines: by bucket an array of shape (num_ranks, gathered_numel), of a stacked unit (num_ranks, num_layers,
            gathered_numel), its leading dim cut over all ranks. `tree.views(bucket, row)` reads a row.
        tree: where every parameter lies. Static.
    """

    lines: dict[str, Any]
    tree: ParamTree = field(metadata={"static": True})

    def __add__(self, other: "LocalGrads") -> "LocalGrads":
        if not isinstance(other, LocalGrads) or other.tree != self.tree:
            raise UsageError(
                f"expected LocalGrads of the same parameters to add, got {type(other).__name__}; reduced gradients are added "
                "by jax.tree.map"
            )
        return jax.tree.map(lambda a, b: a + b, self, other)


jax.tree_util.register_dataclass(LocalGrads)
