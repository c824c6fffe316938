"""A loop over stacked blocks, in which each is gathered by itself: one all-gather a layer, inside the loop."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from crossframe.errors import UsageError
from jax_backend.engine._remat import reshard_after_forward
from jax_backend.shards._bucket import Bucket
from jax_backend.shards._param_tree import ParamTree


@dataclass(frozen=True, eq=False)
class Stack:
    """A stacked unit inside a step, before any of its layers is gathered.

    Attributes:
        tree: where its parameters lie.
        buckets: its buckets.
        sliced: by bucket what each layer is gathered from; leaves have a leading dim of layers.
        gathered: (bucket, one layer of `sliced`) to its leaves, by path.
        frees: whether a layer's backward gathers it again.
    """

    tree: ParamTree
    buckets: tuple[Bucket, ...]
    sliced: dict[str, Any]
    gathered: Callable[[Bucket, Any], dict[str, jax.Array]]
    frees: bool

    def layer(self, sliced: dict[str, Any]) -> dict[str, jax.Array]:
        """The leaves of one layer, by path."""
        return {
            path: leaf for bucket in self.buckets for path, leaf in self.gathered(bucket, sliced[bucket.name]).items()
        }


@dataclass(frozen=True, eq=False)
class StackedLeaf:
    """What a loss function sees in the place of a leaf of a stacked unit: only `scan` can read it."""

    stack: Stack
    path: str

    def __getattr__(self, name: str) -> Any:
        raise UsageError(
            f"parameter {self.path!r} is of a stacked unit, whose layers are gathered one by one, and has no {name!r} here; go "
            "through its blocks by jax_backend.scan(body, init, blocks)"
        )


def scan(
    body: Callable[[Any, Any, Any], tuple[Any, Any]],
    init: Any,
    blocks: Any,
    xs: Any = None,
    *,
    reverse: bool = False,
    unroll: int = 1,
) -> tuple[Any, Any]:
    """`jax.lax.scan` over stacked blocks.

    Args:
        body: (carry, the parameters of one block, x) to (carry, y).
        init: the first carry.
        blocks: the subtree of a stacked unit, as the loss function was given it; or of arrays with a leading dim of layers.
        xs: None, or a pytree whose leaves have that leading dim too.
        reverse, unroll: as of jax.lax.scan.

    Returns:
        The last carry, and the stacked ys.

    Raises:
        UsageError: blocks that are a part of a stacked unit, or parts of several.
    """
    leaves, treedef = jax.tree.flatten(blocks, is_leaf=lambda leaf: isinstance(leaf, StackedLeaf))
    stacks = {id(leaf.stack): leaf.stack for leaf in leaves if isinstance(leaf, StackedLeaf)}
    if not stacks:
        return jax.lax.scan(lambda carry, each: body(carry, *each), init, (blocks, xs), reverse=reverse, unroll=unroll)
    stack = next(iter(stacks.values()))
    own = {path for bucket in stack.buckets for path in stack.tree.paths_of(bucket)}
    given = {leaf.path for leaf in leaves if isinstance(leaf, StackedLeaf)}
    if len(stacks) > 1 or len(given) != len(leaves) or given != own:
        raise UsageError(
            f"scan: expected all leaves of one stacked unit, {sorted(own)}, got {sorted(given)} of {len(stacks)} units and "
            f"{len(leaves) - len(given)} other leaves; pass the unit's subtree as the loss function was given it"
        )

    def layer(carry: Any, each: Any) -> tuple[Any, Any]:
        sliced, x = each
        found = stack.layer(sliced)
        return body(carry, jax.tree.unflatten(treedef, [found[leaf.path] for leaf in leaves]), x)

    # Of its own, beside that around the whole loss, under which a loop ahead of the backward's would gather all layers.
    loop = reshard_after_forward(layer) if stack.frees else layer
    return jax.lax.scan(loop, init, (stack.sliced, xs), reverse=reverse, unroll=unroll)
