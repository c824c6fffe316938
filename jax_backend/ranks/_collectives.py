"""The collectives under the core's names. The only file that calls jax.lax's.

Each is in a named scope with the label of its bucket. The scope survives differentiation, rematerialisation and compilation, so
that `jax_backend.trace_of` can read it from a jaxpr, and profiles show it.

A function that `mesh/_vmap.py` maps over ranks passes them a partition. vmap turns a collective into a reshape or a sum over the
axis of ranks, and the sharding constraint on its result makes XLA place the communication there.
"""

import re

import jax
from jax.sharding import PartitionSpec as P

from crossframe.trace import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from jax_backend.mesh._device_mesh import REPLICATE_AXIS, SHARD_AXIS

WEIGHTS = "<weights>"
"""The label of ranks' weights in a mean, which belong to no bucket."""

OPERAND = ":"
"""Precedes the index of an operand in the label of a collective that moves one array of a bucket (`jax_backend.programs`)."""

_OF_AN_OPERAND = re.compile(OPERAND + r"\d+$")
_SCOPE = re.compile(r"crossframe:(\w+)\[([^\]]*)\]")


def scope_name(kind: str, label: str) -> str:
    """The name of the scope of a collective for a bucket."""
    return f"crossframe:{kind}[{label}]"


def scope_label(kind: str, name_stack: str) -> str | None:
    """The label of the innermost scope of a collective of this kind in a name stack; None if there is none.

    >>> scope_label("all_gather", "jvp(crossframe:all_gather[blocks.0])/x")
    'blocks.0'
    """
    found = [label for scope, label in _SCOPE.findall(name_stack) if scope == kind]
    return found[-1] if found else None


def any_label(name_stack: str) -> str | None:
    """The label of the innermost scope of any collective in a name stack; None if there is none."""
    found = _SCOPE.findall(name_stack)
    return found[-1][1] if found else None


def bucket_label(label: str) -> str:
    """The label of the bucket that a collective with this label belongs to.

    >>> bucket_label("blocks.0#1:3"), bucket_label("a:b")
    ('blocks.0#1', 'a:b')
    """
    return _OF_AN_OPERAND.sub("", label)


def parts_of(label: str) -> tuple[str, int, str]:
    """The unit of a label, the index of its bucket, and that of an array in the bucket, or "".

    >>> parts_of("blocks.0"), parts_of("blocks.0#1:3")
    (('blocks.0', 0, ''), ('blocks.0', 1, '3'))
    """
    bucket = bucket_label(label)
    unit, _, index = bucket.partition("#")
    return unit, int(index or 0), label[len(bucket) :].removeprefix(OPERAND)


def all_gather(shard: jax.Array, label: str, placed: P | None = None, *, dim: int = -1) -> jax.Array:
    """The shards of a shard group, concatenated on a dim: (..., padded_shard_numel) to (..., gathered_numel) on the last one."""
    if _moves_nothing(shard, SHARD_AXIS):
        return shard
    with jax.named_scope(scope_name(ALL_GATHER, label)):
        return _placed(
            jax.lax.all_gather(_placed(shard, placed), SHARD_AXIS, axis=dim % shard.ndim, tiled=True), placed
        )


def reduce_scatter(buffer: jax.Array, label: str, placed: P | None = None, *, dim: int = 0) -> jax.Array:
    """This rank's part on a dim of the sum over its shard group, in XLA's order: (gathered_numel,) to (padded_shard_numel,)."""
    if _moves_nothing(buffer, SHARD_AXIS):
        return buffer
    with jax.named_scope(scope_name(REDUCE_SCATTER, label)):
        whole = _placed(buffer, placed)
        return _placed(jax.lax.psum_scatter(whole, SHARD_AXIS, scatter_dimension=dim, tiled=True), placed)


def all_reduce(array: jax.Array, label: str, placed: P | None = None) -> jax.Array:
    """The sum over replicas, in XLA's order."""
    if _moves_nothing(array, REPLICATE_AXIS):
        return array
    with jax.named_scope(scope_name(ALL_REDUCE, label)):
        return _placed(jax.lax.psum(array, REPLICATE_AXIS), placed)


def sum_over_ranks(number: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The sum of a scalar over all ranks. It belongs to no unit and is in no plan."""
    with jax.named_scope(scope_name(ALL_REDUCE, WEIGHTS)):
        return jax.lax.psum(number, axes)


def _placed(array: jax.Array, partition: P | None) -> jax.Array:
    """The array on its own rank: its mapped dims are sharded over the axes of ranks that vmap gives them, others over the model
    axes of the partition. None: it is there by itself."""
    return array if partition is None else jax.lax.with_sharding_constraint(array, partition)


def _moves_nothing(array: jax.Array, axis: str) -> bool:
    """Whether the group has one rank (R14), or the array is empty, for which XLA has no collective."""
    return not array.size or jax.lax.axis_size(axis) == 1


def rank_index(axes: tuple[str, ...]) -> jax.Array:
    """This rank, as an int32 scalar.

    Args:
        axes: the axes of ranks.
    """
    return jax.lax.axis_index(axes)
