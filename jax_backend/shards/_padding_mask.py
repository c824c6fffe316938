"""The padding of a bucket's arrays: the elements that belong to no parameter, which each rank finds for its own part."""

import operator
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from crossframe.layout import Layout

MOST_OFFSETS = 1 << 30
"""The most elements of a rank's chunk that are masked at once, by offsets in int32; a longer chunk is masked in parts."""


def padding_of(layout: Layout) -> tuple[tuple[int, int], ...]:
    """The runs (start, stop) of padding in the gathered buffer of a layout, in order; runs that touch are one."""
    found: list[tuple[int, int]] = []
    for rank in range(layout.world_size):
        first = rank * layout.padded_shard_numel
        for run in layout.padding(rank):
            start, stop = first + run.start, first + run.stop
            if found and found[-1][1] == start:
                start, _ = found.pop()
            if start < stop:
                found.append((start, stop))
    return tuple(found)


def zeroed(array: jax.Array, dim: int, ranks: int, runs: Iterable[tuple[int, int]]) -> jax.Array:
    """The array with 0 in runs of positions along a dim that is split over ranks. No mask is stored: each rank compares the
    positions of its own elements with the runs.

    [Note: positions are a rank and an offset] Without jax_enable_x64, which is JAX's default, there is no int64, and a position
    in a bucket of 2^31 elements or more fits no integer of JAX. So the dim is split over ranks, which moves nothing, and a
    position is compared as (rank, offset in the rank's chunk), in parts of at most MOST_OFFSETS elements.
    """
    if not (runs := tuple(runs)):
        return array
    chunk = array.shape[dim] // ranks
    table = array.reshape(*array.shape[:dim], ranks, chunk, *array.shape[dim + 1 :])
    parts = []
    for first in range(0, chunk, MOST_OFFSETS):
        part = jax.lax.slice_in_dim(table, first, min(first + MOST_OFFSETS, chunk), axis=dim + 1)
        rank, offset = (jax.lax.broadcasted_iota(jnp.int32, part.shape, axis) for axis in (dim, dim + 1))
        parts.append(jnp.where(in_runs(rank, offset, runs, chunk, first), jnp.zeros_like(part), part))
    whole = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=dim + 1)
    return whole.reshape(array.shape)


def in_runs(rank: Any, offset: Any, runs: Sequence[tuple[int, int]], chunk: int, first: int = 0) -> Any:
    """Whether positions are in any of the runs. All numbers that are compared fit into int32, however large the runs are.

    Args:
        rank: int32 array, numpy's or JAX's: the rank of each position.
        offset: int32 array of the same shape: each position's distance from `first` in its rank's chunk.
        runs: (start, stop) of positions, counted over all ranks' chunks.
        chunk: the size of a rank's chunk.
    """

    def reached(position: int) -> Any:
        of_rank, inside = divmod(position, chunk)
        inside = min(max(inside - first, 0), MOST_OFFSETS)
        return (rank > of_rank) | ((rank == of_rank) & (offset >= inside))

    return reduce(operator.or_, (reached(start) & ~reached(stop) for start, stop in runs))
