"""Assigns ranks to devices, and reads each rank's part of arrays on them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from crossframe.errors import UsageError
from crossframe.mesh import MeshSpec
from crossframe.recording.batches import Batch, batch_of
from jax_backend.mesh._device_mesh import axes_of, data_axes
from jax_backend.tree import is_key


@dataclass(frozen=True)
class Grid:
    """The ranks of a run.

    Attributes:
        spec: copies of the model x ranks of each copy.
        devices: the devices in rank order; of a rank with several, the first one.
        mesh: the mesh of the arrays.
    """

    spec: MeshSpec
    devices: tuple[Any, ...]
    mesh: Mesh

    @classmethod
    def of(cls, arrays: Iterable[Any], mesh: Mesh | None = None) -> "Grid":
        """The ranks of parameters: a copy of the model is sharded over the axes of the mesh that shard any of them.

        Args:
            arrays: the parameters.
            mesh: None: that of the first array that has one; else a single device.
        """
        shardings = [array.sharding for array in arrays if isinstance(array, jax.Array)]
        named = [sharding for sharding in shardings if isinstance(sharding, NamedSharding)]
        if mesh is None:
            found = next((sharding.mesh for sharding in named if isinstance(sharding.mesh, Mesh)), None)
            device = next((next(iter(s.device_set)) for s in shardings), None) or jax.devices()[0]
            mesh = Mesh(np.array([device]), ("rank",)) if found is None else found
        if not isinstance(mesh, Mesh):
            raise UsageError(f"mesh: expected a jax Mesh of devices, got {type(mesh).__name__}")
        cut = {axis for sharding in named for entry in sharding.spec for axis in axes_of(entry)}
        order = sorted(range(len(mesh.axis_names)), key=lambda i: mesh.axis_names[i] in cut)
        devices = mesh.devices.transpose(order).flat
        shard = math.prod(size for name, size in mesh.shape.items() if name in cut)
        return cls(MeshSpec(shard=shard, replicate=mesh.size // shard), tuple(devices), mesh)

    @property
    def here(self) -> tuple[int, ...]:
        """The ranks of this process."""
        process = jax.process_index()
        return tuple(rank for rank, device in enumerate(self.devices) if device.process_index == process)

    def copies(self, array: Any, ranks: Iterable[int] | None = None) -> dict[int, np.ndarray]:
        """The full array of each rank: its own device's part, and the rest from other ranks of its copy of the model. All
        processes call it.

        Args:
            ranks: of this process; None: all of them.
        """
        ranks = self.here if ranks is None else ranks
        if not isinstance(array, jax.Array):
            return dict.fromkeys(ranks, np.asarray(array))
        array = self._replicated(self._undivided(array))
        parts = {part.device: part for part in array.addressable_shards}
        found: dict[int, np.ndarray] = {}
        for rank in ranks:
            own = parts.get(self.devices[rank])
            if own is None:
                found[rank] = np.asarray(array)
            elif own.data.shape == array.shape:
                found[rank] = np.asarray(own.data)
            else:
                found[rank] = self._joined(array, parts, rank, found)
        return found

    def whole(self, array: Any) -> np.ndarray:
        """A full array, also if other processes have parts of it. All processes call it."""
        return np.asarray(self._replicated(array) if isinstance(array, jax.Array) else array)

    def _replicated(self, array: jax.Array) -> jax.Array:
        """An array of which this process has all."""
        if array.is_fully_addressable or array.is_fully_replicated:
            return array
        return jax.jit(lambda each: each, out_shardings=NamedSharding(self.mesh, P()))(array)

    def _undivided(self, array: jax.Array) -> jax.Array:
        """An array of which each device of a rank has all that the rank has. All processes call it."""
        if len(self.devices) == self.mesh.size or not isinstance(array.sharding, NamedSharding):
            return array
        ranks = data_axes(self.mesh)
        spec = P(*(tuple(axis for axis in axes_of(entry) if axis in ranks) or None for entry in array.sharding.spec))
        return jax.jit(lambda each: each, out_shardings=NamedSharding(self.mesh, spec))(array)

    def _joined(self, array: jax.Array, parts: Any, rank: int, found: dict[int, np.ndarray]) -> np.ndarray:
        group = self.spec.shard_group(rank)
        there = [parts[self.devices[each]] for each in group]
        alone = sum(part.data.size for part in there) == array.size
        if alone and (before := next((found[each] for each in group if each in found), None)) is not None:
            return before
        whole = np.empty(array.shape, array.dtype)
        for part in (*there, parts[self.devices[rank]]):
            whole[part.index] = np.asarray(part.data)
        return whole

    def rows(self, array: Any, rank: int) -> np.ndarray:
        """A rank's part of a leading dim: the part on its device, or, if all of it is there, its part in rank order."""
        if isinstance(array, jax.Array):
            if is_key(array):
                array = jax.random.key_data(array)
            array = self._undivided(array)
            own = next((part for part in array.addressable_shards if part.device == self.devices[rank]), None)
            if own is not None and own.data.shape != array.shape:
                return np.asarray(own.data)
        whole = np.asarray(array)
        size = self.spec.world_size
        if not whole.ndim or whole.shape[0] % size:
            return whole
        return whole.reshape(size, whole.shape[0] // size, *whole.shape[1:])[rank]

    def batches(self, microbatches: Sequence[Sequence[Any]]) -> dict[int, Batch]:
        """The batch of each rank of this process.

        Args:
            microbatches: the arrays of each.
        """
        return {
            rank: batch_of([[self.rows(leaf, rank) for leaf in leaves] for leaves in microbatches])
            for rank in self.here
        }

    def numbers(self, value: Any) -> dict[int, float]:
        """A number for each rank of this process, from a scalar or from an array with one for each rank."""
        if np.shape(value) == ():
            return dict.fromkeys(self.here, float(value))
        return {rank: float(self.rows(value, rank)[0]) for rank in self.here}


def are_rows_of(parts: Sequence[Any], whole: Any) -> bool:
    """Whether several pytrees of arrays are the rows of one, in its order. Then a rank has its part of each of them: the first
    rank has rows of every microbatch, not the first rows of the batch."""
    if len(parts) < 2 or any(jax.tree.structure(part) != jax.tree.structure(whole) for part in parts):
        return False
    for leaf, *rows in zip(*map(jax.tree.leaves, (whole, *parts)), strict=True):
        if any(is_key(each) or not np.ndim(each) or not getattr(each, "is_fully_addressable", True) for each in rows):
            return False
        if not np.array_equal(np.concatenate(rows), leaf):
            return False
    return True
