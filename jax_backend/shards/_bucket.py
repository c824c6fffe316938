"""A bucket: the parameters of a unit that are gathered together. Static: it describes arrays and holds none.

A `Bucket` (flat and ragged) has one array of all its parameters, a `PerParamBucket` a dict of one array for each. A *line* is
what a rank sends of either, of shape (padded_shard_numel,), with a leading dim of layers in a stacked unit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from crossframe.dtypes import numpy_dtype
from crossframe.layout import Layout, PerParamLayout
from crossframe.layout import views as numpy_views
from jax_backend.mesh._device_mesh import SHARD_AXIS, ranks_here
from jax_backend.mesh._rank_parts import from_rank_parts
from jax_backend.ranks._collectives import OPERAND
from jax_backend.shards._layers import ONE_LAYER, Layers, OneLayer
from jax_backend.shards._padding_mask import padding_of, zeroed
from jax_backend.shards._views import column_views, line_views

WHOLE = P()
"""The partition of an array that is not divided."""


@dataclass(frozen=True)
class Operand:
    """An array that collectives move by itself.

    Attributes:
        label: the label of its collectives.
        dim: the dim on which ranks have parts of it.
        partition: the partition over the model axes of a rank's part, and of the gathered array.
    """

    label: str
    dim: int
    partition: P = WHOLE


@dataclass(frozen=True)
class Bucket:
    """The uniform part of a unit (R11): what a unit gathers at a time. In this class, of a flat or a ragged layout.

    Attributes:
        name: its key in `ShardedParams.shards`: the unit's name; for further buckets of a unit, followed by what they hold.
        unit: name of the unit.
        layout: the position of each parameter; in a stacked unit, within one layer.
        index: its index among the buckets of its unit.
        trainable: whether its parameters take gradients; if not, it is in `ShardedParams.frozen`.
        layers: the layers of the unit.
    """

    name: str
    unit: str
    layout: Layout
    index: int = 0
    trainable: bool = True
    layers: OneLayer | Layers = ONE_LAYER

    @property
    def label(self) -> str:
        """The name of its collectives in a program."""
        return self.unit if self.index == 0 else f"{self.unit}#{self.index}"

    @property
    def lead(self) -> tuple[int, ...]:
        """The leading dims of its arrays: (num_layers,) in a stacked unit, else ()."""
        return self.layers.lead

    @cached_property
    def indices(self) -> Mapping[str, int]:
        """The index of each parameter in the layout, by canonical name."""
        return {spec.name: i for i, spec in enumerate(self.layout.params)}

    @property
    def line_shape(self) -> tuple[int, ...]:
        """The shape of a line."""
        return (*self.lead, self.layout.padded_shard_numel)

    @property
    def by_rows(self) -> bool:
        """Whether each rank's elements of a parameter are consecutive in row-major order."""
        return True

    def shapes(self) -> PyTree[tuple[int, ...]]:
        """The shape of the bucket's array, or the shapes of its arrays by parameter."""
        return (*self.lead, self.layout.gathered_numel)

    def rank_partitions(self) -> PyTree[P]:
        """The PartitionSpec of the bucket's array over ranks, or those of its arrays by parameter."""
        return P(*(None,) * len(self.lead), SHARD_AXIS)

    def partitions(self) -> PyTree[P]:
        """`rank_partitions` with the model axes."""
        return self.rank_partitions()

    def to_line(self, shard: PyTree[jax.Array]) -> jax.Array:
        """One rank's part of the arrays, or of one layer of them, as a line."""
        return shard

    def from_line(self, line: jax.Array | np.ndarray) -> PyTree[jax.Array]:
        """The inverse of `to_line`."""
        return line

    def from_params(self, params: Mapping[str, jax.Array]) -> PyTree[jax.Array]:
        """The arrays that hold these canonical parameters, with 0 in the padding."""
        layout = self.layout
        assert layout.contiguous, "each parameter of a line is one run of the gathered buffer"
        parts, at = [], 0
        for offset, spec in sorted(zip(layout.offsets, layout.params, strict=True), key=lambda each: each[0]):
            flat = params[spec.name].reshape(*self.lead, -1)
            parts += [jnp.zeros((*self.lead, offset - at), flat.dtype), flat]
            at = offset + flat.shape[-1]
        parts.append(jnp.zeros((*self.lead, layout.gathered_numel - at), parts[-1].dtype))
        return jnp.concatenate([part for part in parts if part.shape[-1]], axis=-1)

    def to_params(self, arrays: PyTree[jax.Array]) -> dict[str, jax.Array]:
        """The inverse of `from_params`."""
        return self.layers.each(self._cut)(arrays)

    def zero_padding(self, arrays: PyTree[jax.Array]) -> PyTree[jax.Array]:
        """The arrays with 0 in the padding, whatever was there (R05). No mask is stored."""
        return zeroed(arrays, arrays.ndim - 1, self.layout.world_size, padding_of(self.layout))

    def _cut(self, gathered: jax.Array) -> dict[str, jax.Array]:
        return line_views(self.layout, gathered)

    def views(self, gathered: PyTree[jax.Array]) -> dict[str, Any]:
        """The parameters in one layer's gathered buffer, or in a buffer of gradients with the same layout.

        Args:
            gathered: numpy or JAX array of shape (gathered_numel,).

        Returns:
            Arrays by canonical name, in canonical shapes, without padding.
        """
        return numpy_views(self.layout, gathered) if isinstance(gathered, np.ndarray) else self._cut(gathered)

    def operands(self) -> PyTree[Operand]:
        """What collectives move in one layer: the bucket's array, or each of its arrays by parameter."""
        return Operand(self.label, 0)

    def unsharded_shapes(self) -> PyTree[tuple[int, ...]]:
        """The shape of the gathered array, or the shapes of the gathered arrays by parameter, in one layer."""
        return (self.layout.gathered_numel,)

    def from_unsharded(self, arrays: PyTree[jax.Array]) -> dict[str, jax.Array]:
        """The parameters by canonical name, without padding, in one layer's gathered array or arrays."""
        return self._cut(arrays)

    def shardings(self, mesh: Mesh | AbstractMesh) -> PyTree[NamedSharding]:
        """`partitions` on a mesh."""
        is_partition = lambda node: isinstance(node, P)  # noqa: E731
        return jax.tree.map(lambda each: NamedSharding(mesh, each), self.partitions(), is_leaf=is_partition)

    def fits(self, arrays: PyTree[jax.Array]) -> bool:
        """Whether arrays have this bucket's form and shapes. Masks and empty nodes in an optimizer's state do not."""
        return bool(jax.tree.leaves(arrays)) and jax.tree.map(jnp.shape, arrays) == self.shapes()

    def constrained(self, arrays: PyTree[jax.Array], mesh: Mesh | AbstractMesh) -> PyTree[jax.Array]:
        """The arrays with this bucket's shardings, inside jit."""
        return jax.tree.map(lambda at, array: jax.lax.with_sharding_constraint(array, at), self.shardings(mesh), arrays)

    def structs(self, mesh: Mesh) -> PyTree[jax.ShapeDtypeStruct]:
        """Its arrays without values."""
        dtype = numpy_dtype(self.layout.dtype)
        return jax.tree.map(
            lambda at, shape: jax.ShapeDtypeStruct(shape, dtype, sharding=at), self.shardings(mesh), self.shapes()
        )

    def assembled(self, mesh: Mesh, own: Callable[[int], PyTree]) -> PyTree[jax.Array]:
        """Global arrays out of each rank's part.

        Args:
            own: maps a rank of this process to its part, as `from_line` returns it; on any device, or in numpy.
        """
        here = ranks_here(mesh)

        def joined(sharding: NamedSharding, shape: tuple[int, ...], *parts: Any) -> jax.Array:
            return from_rank_parts(shape, sharding, dict(zip(here, parts, strict=True)))

        return jax.tree.map(joined, self.shardings(mesh), self.shapes(), *map(own, here))


@dataclass(frozen=True)
class PerParamBucket(Bucket):
    """A bucket of a per-parameter layout: by canonical name, an array of the parameter's shape, or (1,) if it has no dims, whose
    sharded dim is padded to equal chunks (R07).

    Attributes:
        model_partitions: by index of a parameter, the PartitionSpec of one layer of it over the model axes.
    """

    layout: PerParamLayout
    model_partitions: tuple[P, ...] = ()

    def leaf_shape(self, i: int) -> tuple[int, ...]:
        """The shape of one layer of parameter i's array."""
        chunk = self._chunk(i)
        dim = self.layout.shard_dims[i]
        return (*chunk[:dim], chunk[dim] * self.layout.world_size, *chunk[dim + 1 :])

    def leaf_dim(self, i: int) -> int:
        """The dim on which parameter i's array is sharded."""
        return len(self.lead) + self.layout.shard_dims[i]

    def leaf_partition(self, i: int) -> P:
        """The PartitionSpec of parameter i's array."""
        dim, given = self.layout.shard_dims[i], tuple(self.model_partition(i))
        axes: list[Any] = [*given, *(None,) * (dim + 1 - len(given))]
        axes[dim] = SHARD_AXIS
        return P(*(None,) * len(self.lead), *axes)

    def model_partition(self, i: int) -> P:
        """The PartitionSpec of one layer of parameter i over the model axes."""
        return self.model_partitions[i] if self.model_partitions else WHOLE

    def alone(self, i: int) -> "PerParamBucket":
        """The same bucket with parameter i alone."""
        layout = PerParamLayout((self.layout.params[i],), self.layout.world_size, (self.layout.shard_dims[i],))
        return replace(self, layout=layout, model_partitions=(self.model_partition(i),))

    def _chunk(self, i: int) -> tuple[int, ...]:
        """The shape of a rank's part of one layer of parameter i's array."""
        shape, dim = self.layout.cut_shapes[i], self.layout.shard_dims[i]
        return (*shape[:dim], self.layout.chunk_rows(i), *shape[dim + 1 :])

    @property
    def by_rows(self) -> bool:
        return self.layout.on_dim_0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {spec.name: (*self.lead, *self.leaf_shape(i)) for i, spec in enumerate(self.layout.params)}

    def rank_partitions(self) -> dict[str, P]:
        return {spec.name: P(*(None,) * self.leaf_dim(i), SHARD_AXIS) for i, spec in enumerate(self.layout.params)}

    def partitions(self) -> dict[str, P]:
        return {spec.name: self.leaf_partition(i) for i, spec in enumerate(self.layout.params)}

    def operands(self) -> dict[str, "Operand"]:
        return {
            spec.name: Operand(f"{self.label}{OPERAND}{i}", self.layout.shard_dims[i], self.model_partition(i))
            for i, spec in enumerate(self.layout.params)
        }

    def unsharded_shapes(self) -> dict[str, tuple[int, ...]]:
        return {spec.name: self.leaf_shape(i) for i, spec in enumerate(self.layout.params)}

    def from_unsharded(self, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {spec.name: shrunk(arrays[spec.name], spec.shape) for spec in self.layout.params}

    def to_line(self, shard: Any) -> jax.Array:
        shapes = zip(self.layout.params, self.layout.cut_shapes, strict=True)
        arrays = ((shard[spec.name], len(shape)) for spec, shape in shapes)
        return jnp.concatenate(
            [array.reshape(*array.shape[: array.ndim - ndim], -1) for array, ndim in arrays], axis=-1
        )

    def from_line(self, line: Any) -> dict[str, Any]:
        return {
            spec.name: line[..., column.start : column.start + column.width].reshape(*line.shape[:-1], *self._chunk(i))
            for i, (spec, column) in enumerate(zip(self.layout.params, self.layout.columns, strict=True))
        }

    def from_params(self, params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: grown(params[name], shape) for name, shape in self.shapes().items()}

    def to_params(self, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {spec.name: shrunk(arrays[spec.name], (*self.lead, *spec.shape)) for spec in self.layout.params}

    def zero_padding(self, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        found = dict(arrays)
        for i, spec in enumerate(self.layout.params):
            array, dim = arrays[spec.name], self.leaf_dim(i)
            size = self.layout.cut_shapes[i][self.layout.shard_dims[i]]
            if array.shape[dim] > size:
                found[spec.name] = zeroed(array, dim, self.layout.world_size, ((size, array.shape[dim]),))
        return found

    def _cut(self, gathered: jax.Array) -> dict[str, jax.Array]:
        return column_views(self.layout, gathered)


def make_bucket(layout: Layout, **described: Any) -> Bucket:
    """The bucket of a layout, of the class that the layout needs; `described` are the other attributes of `Bucket`."""
    if isinstance(layout, PerParamLayout):
        return PerParamBucket(layout=layout, **described)
    return Bucket(layout=layout, **described)


def grown(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """An array with 0 at the end of each dim that is larger in `shape`, which may have a last dim that the array has not."""
    array = array.reshape(*array.shape, *(1,) * (len(shape) - array.ndim))
    return jnp.pad(array, [(0, wide - size) for size, wide in zip(array.shape, shape, strict=True)])


def shrunk(array: Any, shape: tuple[int, ...]) -> Any:
    """The inverse of `grown`."""
    sizes = (*shape, *(1,) * (array.ndim - len(shape)))
    return array[tuple(slice(size) for size in sizes)].reshape(shape)
