"""A loop over stacked blocks, with one all-gather for each layer inside the loop."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jaxtyping import PyTree

from crossframe.errors import UsageError
from jax_backend.engine._remat import rematerialize, sums
from jax_backend.shards._bucket import Bucket
from jax_backend.shards._param_tree import ParamTree

Carry = TypeVar("Carry")
Y = TypeVar("Y")


@dataclass(frozen=True, eq=False)
class Stack:
    """A stacked unit inside a step, before its layers are gathered.

    Attributes:
        tree: the position of its parameters.
        buckets: its buckets.
        sliced: the Source of each bucket, by name; its leaves have a leading dim of layers.
        gathered: from (bucket, one layer of `sliced`) to the leaves of that layer, by path.
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
    """Stands for a leaf of a stacked unit in a loss function. Only `scan` can read it."""

    stack: Stack
    path: str

    def __getattr__(self, name: str) -> Any:
        raise UsageError(
            f"parameter {self.path!r} belongs to a stacked unit, whose layers are gathered one by one, and has no {name!r} here; "
            "loop over its blocks by jax_backend.scan(body, init, blocks)"
        )


def scan(
    body: Callable[[Carry, PyTree[jax.Array], PyTree], tuple[Carry, Y]],
    init: Carry,
    blocks: PyTree[jax.Array],
    xs: PyTree = None,
    *,
    reverse: bool = False,
    unroll: int = 1,
) -> tuple[Carry, Y]:
    """`jax.lax.scan` over stacked blocks.

    If the unit is resharded after forward, backward gathers each layer again and recomputes elementwise results; results of
    matrix products, reductions and the like are saved (`jax.checkpoint` inside of `body` saves less).

    Args:
        body: from (carry, the parameters of one block, x) to (carry, y).
        init: the first carry.
        blocks: the subtree of a stacked unit in the loss function's parameters; or arrays with a leading dim of layers.
        xs: None, or a pytree whose leaves have that leading dim too.
        reverse, unroll: those of jax.lax.scan.

    Returns:
        The last carry, and the stacked ys.

    Raises:
        UsageError: a part of a stacked unit, or parts of several.
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
            f"{len(leaves) - len(given)} other leaves; pass the unit's subtree unchanged"
        )

    def layer(carry: Any, each: Any) -> tuple[Any, Any]:
        sliced, x = each
        found = stack.layer(sliced)
        return body(carry, jax.tree.unflatten(treedef, [found[leaf.path] for leaf in leaves]), x)

    each_layer = rematerialize(layer, sums) if stack.frees else layer
    return jax.lax.scan(each_layer, init, (stack.sliced, xs), reverse=reverse, unroll=unroll)
