"""The collectives under the core's names. The only file that calls jax.lax's.

Each stands in a named scope that says which unit it is done for. The scope survives differentiation, rematerialisation
and compilation, so that `jax_backend.trace` can read it from a jaxpr, and a profile shows it.
"""

import re

import jax

from crossframe.trace import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from jax_backend.mesh import SHARD_AXIS

_SCOPE = re.compile(r"crossframe:(\w+)\[([^\]]*)\]")


def scope_name(kind: str, unit: str) -> str:
    """The scope in which a collective of this kind is issued for a unit."""
    return f"crossframe:{kind}[{unit}]"


def scope_unit(kind: str, name_stack: str) -> str | None:
    """The unit that a name stack's innermost scope names for a collective of this kind; None if there is no such scope.

    >>> scope_unit("all_gather", "jvp(crossframe:all_gather[blocks.0])/x")
    'blocks.0'
    """
    found = [unit for scope, unit in _SCOPE.findall(name_stack) if scope == kind]
    return found[-1] if found else None


def all_gather(shard: jax.Array, unit: str) -> jax.Array:
    """The shards of all ranks, one behind the other: (padded_shard_numel,) to (gathered_numel,)."""
    if _moves_nothing(shard):
        return shard
    with jax.named_scope(scope_name(ALL_GATHER, unit)):
        return jax.lax.all_gather(shard, SHARD_AXIS, tiled=True)


def reduce_scatter(buffer: jax.Array, unit: str) -> jax.Array:
    """This rank's part of the sum over ranks, in XLA's order: (gathered_numel,) to (padded_shard_numel,)."""
    if _moves_nothing(buffer):
        return buffer
    with jax.named_scope(scope_name(REDUCE_SCATTER, unit)):
        return jax.lax.psum_scatter(buffer, SHARD_AXIS, tiled=True)


def all_reduce(array: jax.Array, unit: str) -> jax.Array:
    """The sum over ranks, in XLA's order, of the array's own shape."""
    with jax.named_scope(scope_name(ALL_REDUCE, unit)):
        return jax.lax.psum(array, SHARD_AXIS)


def _moves_nothing(array: jax.Array) -> bool:
    """Whether there is no one to exchange anything with (R14), or nothing to exchange, which XLA has no collective for."""
    return not array.size or jax.lax.axis_size(SHARD_AXIS) == 1


def rank_index() -> jax.Array:
    """This rank, as an int32 scalar."""
    return jax.lax.axis_index(SHARD_AXIS)
