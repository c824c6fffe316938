"""Which elements of a bucket's array belong to no parameter, as JAX computes it on each rank for itself."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_backend.tree import Bucket


def padding_of(bucket: Bucket) -> tuple[tuple[int, int], ...]:
    """The runs (start, stop) of padding in the gathered buffer of a bucket, in order; runs that touch are one."""
    layout, found = bucket.layout, []
    for rank in range(layout.world_size):
        first = rank * layout.padded_shard_numel
        for run in layout.padding(rank):
            start, stop = first + run.start, first + run.stop
            if found and found[-1][1] == start:
                start, _ = found.pop()
            if start < stop:
                found.append((start, stop))
    return tuple(found)


def zero_padding(bucket: Bucket, arrays: Any) -> Any:
    """The arrays of a bucket, or by parameter of it, with 0 in the padding whatever was there (R05).

    No mask is stored: each rank compares the places of its own elements with the runs of padding.
    """
    if not bucket.is_per_param:
        runs = padding_of(bucket)
        if not runs:
            return arrays
        place = jax.lax.broadcasted_iota(jnp.int64 if arrays.size > 2**31 else jnp.int32, arrays.shape, arrays.ndim - 1)
        padded = [(place >= start) & (place < stop) for start, stop in runs]
        return jnp.where(sum(padded[1:], padded[0]), jnp.zeros_like(arrays), arrays)
    found = dict(arrays)
    for i, spec in enumerate(bucket.layout.params):
        array, dim = arrays[spec.name], bucket.leaf_partition(i).index("shard")
        size = spec.shape[dim - (bucket.num_layers is not None)]
        if array.shape[dim] > size:
            place = jax.lax.broadcasted_iota(jnp.int32, array.shape, dim)
            found[spec.name] = jnp.where(place < size, array, jnp.zeros_like(array))
    return found
