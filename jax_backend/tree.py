"""Where every parameter lies: in the user's pytree, by canonical name, and in which unit. Static: no array."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from crossframe.errors import UsageError
from crossframe.layout import Layout, PerParamLayout
from crossframe.names import MapEntry, ParamMap
from crossframe.params import ParamSpec
from crossframe.precision import PrecisionPolicy
from jax_backend.mesh import SHARD_AXIS
from jax_backend.views import views


@dataclass(frozen=True)
class Bucket:
    """The uniform part of a unit (R11): what travels in one all-gather.

    Attributes:
        name: its key in `ShardedParams.shards`: the unit's name; of further buckets of a unit that followed by what they hold.
        unit: the unit.
        layout: where its parameters lie; of a stacked unit those of one layer.
        index: its place among the buckets of its unit.
        trainable: whether its parameters take gradients; if not, it is in `ShardedParams.frozen`.
        num_layers: None, or of a stacked unit the size of the leading dim of all its parameters.
    """

    name: str
    unit: str
    layout: Layout
    index: int = 0
    trainable: bool = True
    num_layers: int | None = None

    @property
    def label(self) -> str:
        """What its collectives are found by in a program."""
        return self.unit if self.index == 0 else f"{self.unit}#{self.index}"

    @property
    def is_per_param(self) -> bool:
        """Whether every parameter is an array of its own."""
        return isinstance(self.layout, PerParamLayout)

    @cached_property
    def indices(self) -> Mapping[str, int]:
        """The index of each parameter in the layout, by canonical name."""
        return {spec.name: i for i, spec in enumerate(self.layout.params)}

    def leaf_shape(self, i: int) -> tuple[int, ...]:
        """Of a per-parameter bucket: the shape of parameter i's array, padded to equal chunks (R07)."""
        layout = self.layout
        assert isinstance(layout, PerParamLayout)
        shape, dim = layout.params[i].shape, layout.shard_dims[i]
        return (*shape[:dim], layout.chunk_rows(i) * layout.world_size, *shape[dim + 1 :])

    def leaf_partition(self, i: int) -> P:
        """Of a per-parameter bucket: which dim of parameter i's array is cut over the shard axis."""
        assert isinstance(self.layout, PerParamLayout)
        stack = () if self.num_layers is None else (None,)
        return P(*stack, *(None,) * self.layout.shard_dims[i], SHARD_AXIS)

    def shapes(self) -> Any:
        """The shape of the bucket's array, or by parameter those of its arrays."""
        stack = () if self.num_layers is None else (self.num_layers,)
        if self.is_per_param:
            return {spec.name: (*stack, *self.leaf_shape(i)) for i, spec in enumerate(self.layout.params)}
        return (*stack, self.layout.gathered_numel)

    def partitions(self) -> Any:
        """How the bucket's array, or by parameter its arrays, lie on a mesh."""
        if self.is_per_param:
            return {spec.name: self.leaf_partition(i) for i, spec in enumerate(self.layout.params)}
        return P(*(() if self.num_layers is None else (None,)), SHARD_AXIS)

    def to_line(self, shard: Any) -> jax.Array:
        """One rank's part of the bucket as what it sends: shape (padded_shard_numel,), or (num_layers, padded_shard_numel).

        Args:
            shard: the rank's part of the array, or by parameter of the arrays.
        """
        if not self.is_per_param:
            return shard
        stack = () if self.num_layers is None else (self.num_layers,)
        return jnp.concatenate([shard[spec.name].reshape(*stack, -1) for spec in self.layout.params], axis=-1)

    def from_line(self, line: Any) -> Any:
        """The inverse of `to_line`."""
        if not self.is_per_param:
            return line
        layout, stack = self.layout, line.shape[:-1]
        assert isinstance(layout, PerParamLayout)
        found = {}
        for i, (spec, column) in enumerate(zip(layout.params, layout.columns, strict=True)):
            shape, dim = list(spec.shape), layout.shard_dims[i]
            shape[dim] = layout.chunk_rows(i)
            found[spec.name] = line[..., column.start : column.start + column.width].reshape(*stack, *shape)
        return found

    def to_gathered(self, arrays: Any) -> jax.Array:
        """What an all-gather fills, out of whole arrays: shape (gathered_numel,), or (num_layers, gathered_numel).

        Args:
            arrays: the array, or by parameter the arrays, of `shapes`.
        """
        if not self.is_per_param:
            return arrays
        layout, ranks, tables = self.layout, self.layout.world_size, []
        assert isinstance(layout, PerParamLayout)
        for i, (spec, column) in enumerate(zip(layout.params, layout.columns, strict=True)):
            dim = layout.shard_dims[i]
            array, lead = arrays[spec.name], arrays[spec.name].shape[: self.num_layers is not None]
            at, cut = len(lead) + dim, self.leaf_shape(i)
            chunks = array.reshape(*lead, *cut[:dim], ranks, cut[dim] // ranks, *cut[dim + 1 :])
            tables.append(jnp.moveaxis(chunks, at, len(lead)).reshape(*lead, ranks, column.width))
        table = jnp.concatenate(tables, axis=-1)
        return table.reshape(*table.shape[:-2], -1)

    def from_gathered(self, line: jax.Array) -> Any:
        """The inverse of `to_gathered`."""
        if not self.is_per_param:
            return line
        layout, ranks, lead = self.layout, self.layout.world_size, line.shape[:-1]
        assert isinstance(layout, PerParamLayout)
        table, found = line.reshape(*lead, ranks, -1), {}
        for i, (spec, column) in enumerate(zip(layout.params, layout.columns, strict=True)):
            dim, shape = layout.shard_dims[i], list(spec.shape)
            shape[dim] = layout.chunk_rows(i)
            chunks = table[..., column.start : column.start + column.width].reshape(*lead, ranks, *shape)
            chunks = jnp.moveaxis(chunks, len(lead), len(lead) + dim)
            found[spec.name] = chunks.reshape(*lead, *self.leaf_shape(i))
        return found


@dataclass(frozen=True)
class ParamTree:
    """The static half of sharded parameters.

    Attributes:
        buckets: in the order of the plan: the root's first where it owns a parameter.
        param_map: canonical names and axis orders of the pytree's paths.
        paths: the path of every leaf, its parts joined by ".", in the pytree's own order.
        treedef: the structure of the user's pytree.
        policy: in which dtypes parameters are gathered and gradients reduced (R33).
        reshard_after_forward: the user's choice; None: what the strategy says, but for the root (R13).
        shared: paths of leaves that are another leaf's parameter, with that one's path (R31).
    """

    buckets: tuple[Bucket, ...]
    param_map: ParamMap
    paths: tuple[str, ...]
    treedef: Any
    policy: PrecisionPolicy = field(default_factory=PrecisionPolicy)
    reshard_after_forward: bool | None = None
    shared: tuple[tuple[str, str], ...] = ()

    # Every call of a jitted function hashes this; hashing the layouts of a large model anew each time would show.
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
        """Layouts by the name of the bucket: the unit's, where it has one."""
        return {bucket.name: bucket.layout for bucket in self.buckets}

    @cached_property
    def trainable(self) -> tuple[Bucket, ...]:
        """The buckets whose parameters take gradients."""
        return tuple(bucket for bucket in self.buckets if bucket.trainable)

    @cached_property
    def is_per_param(self) -> bool:
        """Whether every parameter that is trained is an array of its own."""
        return all(bucket.is_per_param for bucket in self.trainable)

    @cached_property
    def bucket_of(self) -> Mapping[str, Bucket]:
        """Buckets by the canonical names of their parameters."""
        return {spec.name: bucket for bucket in self.buckets for spec in bucket.layout.params}

    @cached_property
    def specs(self) -> Mapping[str, ParamSpec]:
        """Canonical descriptions by path; of a stacked unit those of one layer."""
        by_name = {spec.name: spec for bucket in self.buckets for spec in bucket.layout.params}
        return {path: by_name[self.entry(path).name] for path in self.paths}

    @cached_property
    def trained_leaves(self) -> Mapping[str, tuple[Bucket, int]]:
        """Of a per-parameter tree, by path of each leaf that is trained: its bucket, and its parameter's index there. Paths of
        shared leaves are left out."""
        entries = self.param_map.by_name
        return {
            path: (bucket, i)
            for bucket in self.trainable
            for i, spec in enumerate(bucket.layout.params)
            for path in entries[spec.name].paths
        }

    @property
    def world_size(self) -> int:
        """The number of ranks that the units are laid out over: one shard group."""
        return self.buckets[0].layout.world_size

    def partitions(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """By bucket, how the arrays lie on a mesh."""
        return {name: self.by_name[name].partitions() for name in arrays}

    def entry(self, path: str) -> MapEntry:
        """The map's entry of a leaf: of a shared one that of the parameter."""
        return self.param_map.by_path[self._owner.get(path, path)]

    @cached_property
    def _owner(self) -> Mapping[str, str]:
        return dict(self.shared)

    def views(self, bucket: str, gathered: Any) -> dict[str, Any]:
        """The parameters in a bucket's gathered buffer, or in a buffer of gradients laid out like one.

        Args:
            bucket: its name.
            gathered: numpy or JAX array of shape (gathered_numel,).

        Returns:
            Arrays by canonical name, of canonical shape; padding is in none of them.
        """
        return views(self.layouts[bucket], gathered)

    def params(self, gathered: Mapping[str, Any]) -> Any:
        """The user's pytree, in its own structure and axis order, out of the gathered buffers of all buckets.

        Args:
            gathered: by bucket an array of shape (gathered_numel,), of a stacked one (num_layers, gathered_numel); or what is to
                stand at its leaves, by path.
        """
        found: dict[str, Any] = {}
        for bucket in self.buckets:
            given = gathered[bucket.name]
            if isinstance(given, Mapping):
                found |= given
            elif bucket.num_layers is None:
                found |= self.cut(bucket, given)
            else:
                layers = [self.cut(bucket, line) for line in given]
                stack = jnp.stack if isinstance(given, jax.Array) else np.stack
                found |= {path: stack([layer[path] for layer in layers]) for path in layers[0]}
        return jax.tree.unflatten(self.treedef, [found[self._owner.get(path, path)] for path in self.paths])

    def paths_of(self, bucket: Bucket) -> tuple[str, ...]:
        """Of a bucket's leaves; of a shared parameter only its owner's."""
        return tuple(path for spec in bucket.layout.params for path in self.param_map.by_name[spec.name].paths)

    def cut(self, bucket: Bucket, gathered: Any) -> dict[str, Any]:
        """The leaves of the user's pytree in one bucket's gathered buffer, by path."""
        return self.leaves_of(bucket, views(bucket.layout, gathered))

    def leaves_of(self, bucket: Bucket, named: Mapping[str, Any]) -> dict[str, Any]:
        """The same out of the bucket's parameters, by canonical name and in canonical shape."""
        entries = {path: self.param_map.by_path[path] for path in self.paths_of(bucket)}
        return {path: entry.from_canonical(named[entry.name], path) for path, entry in entries.items()}

    def leaves(self, params: Any) -> dict[str, Any]:
        """The leaves of a pytree like the user's, by path, once each fits.

        Raises:
            UsageError: another structure, shape or dtype than the parameters had when they were sharded.
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
            num_layers = self.bucket_of[spec.name].num_layers
            expected = shape if num_layers is None else (num_layers, *shape)
            if np.shape(leaf) != expected or dtype_name(leaf) != spec.dtype:
                raise UsageError(
                    f"parameter {path!r} ({spec.name!r}): expected shape {expected} and dtype {spec.dtype}, got "
                    f"{np.shape(leaf)} and {dtype_name(leaf)}; reshape or cast it first"
                )
        return found


def path_name(path: tuple[Any, ...]) -> str:
    """A key path of jax.tree_util as one name, its parts joined by ".".

    >>> path_name((jax.tree_util.DictKey("blocks"), jax.tree_util.SequenceKey(0), jax.tree_util.DictKey("kernel")))
    'blocks.0.kernel'
    """
    # A last attribute `value` is the box that flax puts around an array (nnx.Param), not a part of the name.
    if len(path) > 1 and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value":
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator=".")


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """The leaves of any pytree by the name of their path, in the tree's order; UsageError if two share a name."""
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if (name := path_name(path)) in found:
            raise UsageError(f"two leaves have the path {name!r}, joined by '.': expected one each; rename a key")
        found[name] = leaf
    return found


def dtype_name(leaf: Any) -> str:
    """The dtype of an array, or of what is not one, by name."""
    return jnp.result_type(leaf).name if not hasattr(leaf, "dtype") else str(leaf.dtype)
