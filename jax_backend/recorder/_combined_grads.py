"""Combines each rank's own gradients of several calls of `value_and_grad` to those of one step, as the loop does."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_backend.recorder._array_interior import mean_square
from jax_backend.shards._local_grads import LocalGrads
from jax_backend.shards._sharded_params import ShardedParams


def combined(calls: Sequence[tuple[LocalGrads, ShardedParams | None]], grads: Any) -> LocalGrads | None:
    """Each rank's own gradients at a step, combined as the loop combines the reduced ones; None if it does so in another way.

    Args:
        calls: each rank's own gradients and the reduced ones, if they are known, of every call that reduces them.
        grads: those that the loop passed to `step`: of one call these are known whatever it did to them, such as clipping. Of
            several they have to be their mean or their sum.
    """
    if len(calls) < 2:
        return calls[0][0] if calls else None
    own, total = (functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), each) for each in zip(*calls, strict=True))
    if jax.tree.structure(grads) != jax.tree.structure(total):
        return None
    for factor in (1 / len(calls), 1.0):
        if _are_near(grads, jax.tree.map(lambda value, by=factor: by * value, total)):
            return jax.tree.map(lambda value, by=factor: by * value, own)
    return None


def _are_near(a: Any, b: Any) -> bool:
    """Whether two trees of arrays are equal up to rounding of their dtypes."""
    units = [float(jnp.finfo(leaf.dtype).eps) for leaf in jax.tree.leaves(a)]
    return _norm(jax.tree.map(jnp.subtract, a, b)) <= max(1e-4, 4 * max(units, default=0.0)) * _norm(b)


def _norm(tree: Any) -> float:
    return math.sqrt(sum(leaf.size * float(mean_square(leaf)) for leaf in jax.tree.leaves(tree) if leaf.size))
