"""A bucket: the parameters of a unit that one all-gather moves, and the layout of their arrays. Static: no array."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from crossframe.layout import Layout, PerParamLayout
from jax_backend.mesh._device_mesh import SHARD_AXIS


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
