"""A rank's part of a global array, and global arrays out of the ranks' parts.

A rank's part is what its devices have together: all of it on each, or divided over the model axes.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from crossframe.errors import UsageError
from jax_backend.mesh._device_mesh import axes_of, devices_of, model_axes, num_ranks, ranks_here


def part_of_rank(array: jax.Array, mesh: Mesh, rank: int) -> Any:
    """A rank's part of an array: a JAX array on its first device, or, if its devices divide it, in numpy.

    Raises:
        UsageError: the rank is in another process, or has devices there.
    """
    parts = {part.device: part for part in array.addressable_shards}
    own = [parts[device] for device in devices_of(mesh, rank) if device in parts]
    if not own:
        raise UsageError(f"rank {rank} is in another process; this one has ranks {ranks_here(mesh)}")
    check_in_one_process(mesh, rank)
    # (devices, dims, 2): the range of each device's part.
    ranges = np.array([[each.indices(size)[:2] for each, size in zip(part.index, array.shape, strict=True)]
                       for part in own]).reshape(len(own), array.ndim, 2)  # fmt: skip
    first, stop = ranges[..., 0].min(axis=0), ranges[..., 1].max(axis=0)
    shape = tuple(int(size) for size in stop - first)
    if own[0].data.shape == shape:
        return own[0].data
    whole = np.empty(shape, array.dtype)
    for part, each in zip(own, ranges, strict=True):
        whole[tuple(slice(*bounds) for bounds in each - first[:, None])] = np.asarray(part.data)
    return whole


def check_in_one_process(mesh: Mesh, rank: int) -> None:
    """Raise UsageError if the devices of a rank belong to several processes, so that none can read its shard."""
    processes = sorted({device.process_index for device in devices_of(mesh, rank)})
    if len(processes) > 1:
        raise UsageError(
            f"rank {rank} has devices in the processes {processes}: expected one process, to read its shard; give make_mesh the "
            "devices in an order in which those of a rank belong to one process; jax_backend.orbax saves either"
        )


def from_rank_parts(shape: tuple[int, ...], sharding: NamedSharding, parts: Mapping[int, Any]) -> jax.Array:
    """A global array out of each rank's part.

    Args:
        parts: by rank with a device in this process, its part, on any device or in numpy.
    """
    mesh: Any = sharding.mesh
    rank_of = {device: rank for rank in range(num_ranks(mesh)) for device in devices_of(mesh, rank)}
    divided = [dim for dim, entry in enumerate(sharding.spec) if entry and set(axes_of(entry)) <= set(model_axes(mesh))]
    placed = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        part = parts[rank_of[device]]
        if divided:
            assert index is not None, "the sharding has devices in this process"
            part = part[tuple(index[dim] if dim in divided else slice(None) for dim in range(len(shape)))]
        placed.append(jax.device_put(part, device))
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)
