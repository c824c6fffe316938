"""Arrays with the form of a bucket, as lines of a checkpoint and back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from crossframe.checkpoint import state_layout
from crossframe.layout import Layout
from jax_backend.mesh._device_mesh import mesh_spec, ranks_here
from jax_backend.mesh._rank_parts import from_rank_parts, part_of_rank
from jax_backend.shards._bucket import Bucket
from jax_backend.shards._sharded_params import ShardedParams

# By index in the shard group, one rank's line of each layout.
Lines = Mapping[int, list[np.ndarray]]


@dataclass(frozen=True)
class Part:
    """The arrays of a bucket: parameters, or an optimizer's state of them.

    Attributes:
        arrays: one array, or a dict of them by parameter, with the bucket's shardings.
        units: (unit, layout) of each line; one for each layer of a stacked bucket.
        axes: None, or the axes that transpose an array, without its layers, into canonical order.
    """

    bucket: Bucket
    arrays: Any
    mesh: Mesh
    units: tuple[tuple[str, Layout], ...]
    axes: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls, bucket: Bucket, arrays: Any, mesh: Mesh, entry: str = "", axes: tuple[int, ...] | None = None
    ) -> "Part":
        """The part of a bucket.

        Args:
            entry: name of the state entry in a checkpoint; "": the parameters themselves.
        """
        dtype = str(jax.tree.leaves(arrays)[0].dtype)
        # The layers of a stacked unit have the names of torch's list of blocks.
        units = tuple(
            (bucket.unit, state_layout(bucket.layout, entry, dtype, rename))
            for rename in bucket.layers.renames(bucket.unit)
        )
        if axes is not None:
            lead = len(bucket.lead)
            axes = (*range(lead), *(lead + axis for axis in axes))

        def placed(array: jax.Array, partition: P) -> jax.Array:
            """The array with the ranks' parts on their devices, whatever sharding XLA chose."""
            if axes is not None:
                dims = [*partition, *(None,) * (array.ndim - len(partition))]
                partition = P(*(dims[axes.index(i)] for i in range(array.ndim)))
            sharding = NamedSharding(mesh, partition)
            return array if array.sharding.is_equivalent_to(sharding, array.ndim) else jax.device_put(array, sharding)

        return cls(bucket, jax.tree.map(placed, arrays, bucket.partitions()), mesh, units, axes)

    def lines(self, place: int) -> list[np.ndarray]:
        """The lines of a rank of the first replica, in this process."""

        def here(array: jax.Array) -> Any:
            part = part_of_rank(array, self.mesh, place)
            return part if self.axes is None else np.asarray(part).transpose(self.axes)

        return list(self.bucket.layers.split(np.asarray(self.bucket.to_line(jax.tree.map(here, self.arrays)))))

    def joined(self, by_place: Lines) -> Any:
        """Arrays like these with the values of lines, for the indices in this process."""
        spec, own = mesh_spec(self.mesh), {}
        for rank in ranks_here(self.mesh):
            lines = by_place[spec.coordinate(rank)[1]]
            own[rank] = self.bucket.from_line(self.bucket.layers.join(lines))

        def array(like: Any, *parts: np.ndarray) -> jax.Array:
            if self.axes is not None:
                parts = tuple(part.transpose(np.argsort(self.axes)) for part in parts)
            return from_rank_parts(like.shape, like.sharding, dict(zip(own, parts, strict=True)))

        return jax.tree.map(array, self.arrays, *own.values())


def model_parts(sharded: ShardedParams, mesh: Mesh) -> list[Part]:
    """The parts of all parameters, trained or frozen."""
    return [
        Part.of(bucket, sharded.buckets[bucket.name], mesh)
        for bucket in sharded.tree.buckets
        if bucket.name in sharded.buckets
    ]
