"""The collectives under the core's names. The only file that calls jax.lax's.

Each stands in a named scope that says which bucket it is done for, by its label. The scope survives differentiation,
rematerialisation and compilation, so that `jax_backend.trace_of` can read it from a jaxpr, and a profile shows it.
"""

import re

import jax

from crossframe.trace import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from jax_backend.mesh._device_mesh import REPLICATE_AXIS, SHARD_AXIS

WEIGHTS = "<weights>"
"""In the place of a bucket's label: what ranks count for in a mean."""

_SCOPE = re.compile(r"crossframe:(\w+)\[([^\]]*)\]")


def scope_name(kind: str, label: str) -> str:
    """The scope in which a collective of this kind is issued for a bucket."""
    return f"crossframe:{kind}[{label}]"


def scope_label(kind: str, name_stack: str) -> str | None:
    """The label that a name stack's innermost scope names for a collective of this kind; None if there is no such scope.

    >>> scope_label("all_gather", "jvp(crossframe:all_gather[blocks.0])/x")
    'blocks.0'
    """
    found = [label for scope, label in _SCOPE.findall(name_stack) if scope == kind]
    return found[-1] if found else None


def any_label(name_stack: str) -> str | None:
    """The label that a name stack's innermost scope names, of whatever kind; None if there is none."""
    found = _SCOPE.findall(name_stack)
    return found[-1][1] if found else None


def all_gather(shard: jax.Array, label: str) -> jax.Array:
    """The shards of a shard group, one behind the other: (..., padded_shard_numel) to (..., gathered_numel)."""
    if _moves_nothing(shard, SHARD_AXIS):
        return shard
    with jax.named_scope(scope_name(ALL_GATHER, label)):
        return jax.lax.all_gather(shard, SHARD_AXIS, axis=shard.ndim - 1, tiled=True)


def reduce_scatter(buffer: jax.Array, label: str) -> jax.Array:
    """This rank's part of the sum over its shard group, in XLA's order: (gathered_numel,) to (padded_shard_numel,)."""
    if _moves_nothing(buffer, SHARD_AXIS):
        return buffer
    with jax.named_scope(scope_name(REDUCE_SCATTER, label)):
        return jax.lax.psum_scatter(buffer, SHARD_AXIS, tiled=True)


def all_reduce(array: jax.Array, label: str) -> jax.Array:
    """The sum over replicas, in XLA's order, of the array's own shape."""
    if _moves_nothing(array, REPLICATE_AXIS):
        return array
    with jax.named_scope(scope_name(ALL_REDUCE, label)):
        return jax.lax.psum(array, REPLICATE_AXIS)


def sum_over_ranks(number: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The sum of a scalar over all ranks: no gradient of any unit, and in no plan."""
    with jax.named_scope(scope_name(ALL_REDUCE, WEIGHTS)):
        return jax.lax.psum(number, axes)


def _moves_nothing(array: jax.Array, axis: str) -> bool:
    """Whether there is no one to exchange anything with (R14), or nothing to exchange, which XLA has no collective for."""
    return not array.size or jax.lax.axis_size(axis) == 1


def rank_index(axes: tuple[str, ...]) -> jax.Array:
    """This rank, as an int32 scalar.

    Args:
        axes: those of the mesh.
    """
    return jax.lax.axis_index(axes)
