"""The interior of a step whose arrays are whole, and each rank's part of an activation."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_backend.activations import Activations
from jax_backend.recorder._device_ranks import Grid
from jax_backend.recorder._taps import Value
from jax_backend.tree import is_floating, is_key


@dataclass(frozen=True)
class ArrayInterior:
    """The interior of one microbatch.

    Attributes:
        params: the parameters of the forward, by name.
        activations: their values are dicts by rank.
    """

    params: Mapping[str, Any]
    activations: Activations


def may_be_batch(value: Any) -> bool:
    """Whether a value may be part of a batch: an array with dims that is no random key."""
    if not hasattr(value, "dtype") or not np.ndim(value) or is_key(value):
        return False
    return not (value.dtype == np.uint32 and value.shape == (2,))


def first_floating(output: Any) -> Any:
    """The first floating array of a pytree; None if it has none."""
    return next(filter(is_floating, jax.tree.leaves(output)), None)


def compute_dtype(activations: Iterable[Value]) -> str | None:
    """The half precision in which modules compute, by their inputs and outputs; None if they have none."""
    names = {value.array.dtype.name for value in activations if value.array is not None}
    return next((name for name in ("bfloat16", "float16") if name in names), None)


def mean_square(output: Any) -> Any:
    """The mean square of an array, in float32 or wider. Its root is the loss of a step of forward alone, as in torch."""
    return jnp.mean(jnp.square(output.astype(jnp.promote_types(output.dtype, jnp.float32))))


def by_rank(value: Value, batch: Sequence[Any], grid: Grid) -> dict[int, np.ndarray]:
    """Each rank's part of an activation: the rows that belong to the samples on its device."""
    if value.by_rank:
        return {rank: grid.rows(value.array, rank)[0] for rank in grid.here}
    whole = grid.whole(value.array)
    size = batch[0].shape[0] if batch else 0
    if not size or not whole.ndim or whole.shape[0] % size:
        return dict.fromkeys(grid.here, whole)
    per_sample, found = whole.shape[0] // size, {}
    for rank in grid.here:
        start, stop = _samples(batch[0], grid, rank)
        found[rank] = whole[start * per_sample : stop * per_sample]
    return found


def _samples(array: Any, grid: Grid, rank: int) -> tuple[int, int]:
    """The samples of a rank, as `Grid.rows` reads them."""
    size, world = array.shape[0], grid.spec.world_size
    if isinstance(array, jax.Array):
        index = array.sharding.devices_indices_map(array.shape).get(grid.devices[rank])
        if index is not None and (own := index[0].indices(size)[:2]) != (0, size):
            return own
    if size % world:
        return 0, size
    return rank * size // world, (rank + 1) * size // world
