"""Each rank's own gradients, before any reduction: they accumulate over microbatches that reduce nothing (R15)."""

from dataclasses import dataclass, field

import jax
from jaxtyping import PyTree

from crossframe.errors import UsageError
from jax_backend.shards._param_tree import ParamTree


@dataclass(frozen=True)
class LocalGrads:
    """Every rank's own full gradients. Not ShardedParams, since no optimizer may take them.

    Add them by `+`, and pass them to a step as `accumulated`, which reduces them with its own.

    Attributes:
        lines: for each bucket an array of shape (num_ranks, gathered_numel), or (num_ranks, num_layers, gathered_numel) if
            stacked, whose leading dim is sharded over all ranks. `tree.views(bucket, row)` reads a row.
        tree: the position of every parameter. Static.
    """

    lines: dict[str, PyTree[jax.Array]]
    tree: ParamTree = field(metadata={"static": True})

    def __add__(self, other: "LocalGrads") -> "LocalGrads":
        if not isinstance(other, LocalGrads) or other.tree != self.tree:
            raise UsageError(
                f"expected LocalGrads of the same parameters to add, got {type(other).__name__}; reduced gradients are added "
                "by jax.tree.map"
            )
        return jax.tree.map(lambda a, b: a + b, self, other)


jax.tree_util.register_dataclass(LocalGrads)
