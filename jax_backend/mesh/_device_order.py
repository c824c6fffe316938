"""The order of devices on a mesh: on TPUs that of `jax.make_mesh`, by their topology; elsewhere that of `jax.devices()`."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils


def ordered_devices(devices: Sequence[Any], shape: Sequence[int]) -> np.ndarray:
    """As many devices as a mesh has, in its shape.

    TPUs of one slice are ordered by their coordinates, so that neighbours on an axis are connected. Of several slices, each has a
    contiguous part of the outermost axes that their number divides. Where JAX has no such order, as for devices that fill no box
    of the topology, they keep the given one. Tested with descriptions of devices, never run on TPUs.

    Args:
        devices: all devices; the first ones are used.
        shape: the sizes of the axes, the outermost first.
    """
    first = list(devices[: math.prod(shape)])
    if first[0].platform == "tpu":
        slices = _slices_by_axis(first, shape)
        try:
            if slices is not None and math.prod(slices) > 1:
                inside = [size // number for size, number in zip(shape, slices, strict=True)]
                return mesh_utils.create_hybrid_device_mesh(inside, slices, first, allow_split_physical_axes=True)
            if slices is not None:
                return mesh_utils.create_device_mesh(shape, first, allow_split_physical_axes=True)
        except (AssertionError, NotImplementedError, ValueError):
            pass
    grid = np.empty(len(first), dtype=object)
    grid[:] = first
    return grid.reshape(tuple(shape))


def _slices_by_axis(devices: Sequence[Any], shape: Sequence[int]) -> list[int] | None:
    """The number of slices along each axis; None if slices have different numbers of devices, or do not divide the axes."""
    sizes = Counter(getattr(device, "slice_index", 0) for device in devices)
    left, found = len(sizes), []
    for size in shape:
        found.append(math.gcd(size, left))
        left //= found[-1]
    return found if left == 1 and len(set(sizes.values())) == 1 else None
