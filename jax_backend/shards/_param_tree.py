"""The position of every parameter: in the user's pytree, by canonical name, and in its unit. Static: no array."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from crossframe.errors import UsageError
from crossframe.layout import Layout
from crossframe.param_map import MapEntry, ParamMap
from crossframe.params import ParamSpec
from crossframe.precision import PrecisionPolicy
from jax_backend.mesh._device_mesh import axes_of
from jax_backend.shards._bucket import Bucket, PerParamBucket
from jax_backend.tree import dtype_name, leaves_by_path


@dataclass(frozen=True)
class ParamTree:
    """The static half of sharded parameters.

    Attributes:
        buckets: the buckets in the order of the plan; those of the root first, if it owns a parameter.
        param_map: canonical names and axis orders of the pytree's paths.
        paths: the path of every leaf, its parts joined by ".", in the pytree's own order.
        treedef: the structure of the user's pytree.
        policy: the dtypes in which parameters are gathered and gradients reduced (R33).
        reshard_after_forward: the user's choice; None: as the strategy says, except for the root (R13).
        shared: (path, path of the owner) of each leaf that shares another leaf's parameter (R31).
    """

    buckets: tuple[Bucket, ...]
    param_map: ParamMap
    paths: tuple[str, ...]
    treedef: Any
    policy: PrecisionPolicy = field(default_factory=PrecisionPolicy)
    reshard_after_forward: bool | None = None
    shared: tuple[tuple[str, str], ...] = ()

    # Every call of a jitted function hashes this, and the layouts of a large model take long to hash.
    @cached_property
    def _hash(self) -> int:
        return hash((self.buckets, self.param_map, self.paths, self.treedef, self.policy, self.shared))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def units(self) -> tuple[tuple[str, Layout], ...]:
        """(unit name, layout) of every bucket."""
        return tuple((bucket.unit, bucket.layout) for bucket in self.buckets)

    @cached_property
    def by_name(self) -> Mapping[str, Bucket]:
        """Buckets by name."""
        return {bucket.name: bucket for bucket in self.buckets}

    @cached_property
    def layouts(self) -> Mapping[str, Layout]:
        """Layouts by bucket name."""
        return {bucket.name: bucket.layout for bucket in self.buckets}

    @cached_property
    def trainable(self) -> tuple[Bucket, ...]:
        """The buckets whose parameters take gradients."""
        return tuple(bucket for bucket in self.buckets if bucket.trainable)

    @cached_property
    def plain(self) -> tuple[Bucket, ...]:
        """The buckets of units that are gathered as a whole."""
        return tuple(bucket for bucket in self.buckets if not bucket.lead)

    @cached_property
    def stacked(self) -> tuple[Bucket, ...]:
        """The buckets of stacked units, which are gathered layer by layer."""
        return tuple(bucket for bucket in self.buckets if bucket.lead)

    @cached_property
    def bucket_of(self) -> Mapping[str, Bucket]:
        """Buckets by the canonical names of their parameters."""
        return {spec.name: bucket for bucket in self.buckets for spec in bucket.layout.params}

    @cached_property
    def specs(self) -> Mapping[str, ParamSpec]:
        """Canonical descriptions by path; in a stacked unit, of one layer."""
        by_name = {spec.name: spec for bucket in self.buckets for spec in bucket.layout.params}
        return {path: by_name[self.entry(path).name] for path in self.paths}

    @cached_property
    def trained_leaves(self) -> Mapping[str, tuple[PerParamBucket, int]]:
        """By path of each trained leaf, its bucket and the index of its parameter there; without the paths of shared leaves.
        Empty unless each trained parameter has an array of its own."""
        entries = self.param_map.by_name
        return {
            path: (bucket, i)
            for bucket in self._per_param or ()
            for i, spec in enumerate(bucket.layout.params)
            for path in entries[spec.name].paths
        }

    @property
    def is_per_param(self) -> bool:
        """Whether each trained parameter has an array of its own."""
        return self._per_param is not None

    @cached_property
    def _per_param(self) -> list[PerParamBucket] | None:
        found = [bucket for bucket in self.trainable if isinstance(bucket, PerParamBucket)]
        return found if len(found) == len(self.trainable) else None

    @cached_property
    def model_axes(self) -> frozenset[str]:
        """The model axes of the mesh over which parameters are divided."""
        buckets = (bucket for bucket in self.buckets if isinstance(bucket, PerParamBucket))
        return frozenset(
            axis
            for bucket in buckets
            for partition in bucket.model_partitions
            for entry in partition
            for axis in axes_of(entry)
        )

    @property
    def world_size(self) -> int:
        """The number of ranks in a shard group."""
        return self.buckets[0].layout.world_size

    def rank_partitions(self, arrays: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """`Bucket.rank_partitions` of these buckets, by bucket."""
        return {name: self.by_name[name].rank_partitions() for name in arrays}

    def entry(self, path: str) -> MapEntry:
        """The map's entry of a leaf; for a shared leaf, that of its owner."""
        return self.param_map.by_path[self._owner.get(path, path)]

    @cached_property
    def _owner(self) -> Mapping[str, str]:
        return dict(self.shared)

    def views(self, bucket: str, gathered: PyTree[jax.Array]) -> dict[str, Any]:
        """`Bucket.views` of a bucket, by its name."""
        return self.by_name[bucket].views(gathered)

    def params(self, gathered: Mapping[str, PyTree]) -> PyTree:
        """The user's pytree, in its own structure and axis order, from the gathered buffers of all buckets.

        Args:
            gathered: for each bucket an array of shape (gathered_numel,), with a leading dim of layers if stacked; or the leaves
                by path.
        """
        found: dict[str, Any] = {}
        for bucket in self.buckets:
            given = gathered[bucket.name]
            if isinstance(given, Mapping):
                found |= given
            else:
                layers = [self.cut(bucket, line) for line in bucket.layers.split(given)]
                found |= {path: bucket.layers.join([layer[path] for layer in layers]) for path in layers[0]}
        return jax.tree.unflatten(self.treedef, [found[self._owner.get(path, path)] for path in self.paths])

    def paths_of(self, bucket: Bucket) -> tuple[str, ...]:
        """The paths of a bucket's leaves; for a shared parameter, only its owner's."""
        return tuple(path for spec in bucket.layout.params for path in self.param_map.by_name[spec.name].paths)

    def cut(self, bucket: Bucket, gathered: PyTree[jax.Array]) -> dict[str, Any]:
        """The leaves of the user's pytree, by path, in one bucket's gathered buffer."""
        return self.leaves_of(bucket, bucket.views(gathered))

    def leaves_of(self, bucket: Bucket, named: Mapping[str, Any]) -> dict[str, Any]:
        """The leaves of the user's pytree, by path, from a bucket's canonical parameters."""
        entries = {path: self.param_map.by_path[path] for path in self.paths_of(bucket)}
        return {path: entry.from_canonical(named[entry.name], path) for path, entry in entries.items()}

    def leaves(self, params: PyTree) -> dict[str, Any]:
        """The leaves, by path, of a pytree like the user's, checked.

        Raises:
            UsageError: a structure, shape or dtype that differs from those of the sharded parameters.
        """
        found = leaves_by_path(params)
        if set(found) != set(self.paths):
            missing, extra = sorted(set(self.paths) - set(found)), sorted(set(found) - set(self.paths))
            raise UsageError(
                f"the parameters are not the tree that was sharded: missing {missing}, unexpected {extra}; "
                "pass the tree that unshard returned, with other values"
            )
        for path, leaf in found.items():
            spec, entry = self.specs[path], self.entry(path)
            shape = entry.leaf_shape(spec.shape, self._owner.get(path, path))
            expected = (*self.bucket_of[spec.name].lead, *shape)
            if np.shape(leaf) != expected or dtype_name(leaf) != spec.dtype:
                raise UsageError(
                    f"parameter {path!r} ({spec.name!r}): expected shape {expected} and dtype {spec.dtype}, got "
                    f"{np.shape(leaf)} and {dtype_name(leaf)}; reshape or cast it first"
                )
        return found
