"""A function of one rank under jit: vmap over axes that are named and sharded like the mesh's.

[Note: a rank under jit] A program under jit is written for the whole mesh: a mean over the batch would be over the samples of all
ranks, and batch norm another function. So each mesh axis becomes a mapped axis of the same name, sharded over the mesh: the
function sees one rank's values and calls collectives by the names of axes, as under shard_map, and XLA places the communication.
Model axes are not mapped: over them nothing is constrained here.

[Note: operations of one rank] vmap makes one convolution of those of all ranks, with a group of features for each. XLA does not
divide it over the devices as it should: up to JAX 0.10.2 at least, the gradient of a kernel of 1 x 1 is wrong. On a mesh with
replicas its CPU compiler fails at Fourier transforms. So each rank's convolutions and transforms are under shard_map.
"""

import functools
import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.layout import Layout, with_layout_constraint
from jax.interpreters import batching
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from crossframe.replacing import setting
from jax_backend.mesh._device_mesh import axes_of, data_axes, model_axes

_axes_of_ranks = ContextVar[tuple[str, ...]]("_axes_of_ranks", default=())
"""The axes that are mapped; none outside of `vmap_over_mesh`."""


def mapped_ranks() -> tuple[str, ...]:
    """The axes of the mesh that `vmap_over_mesh` maps around the function that is traced, outermost first."""
    return _axes_of_ranks.get()


def vmap_over_mesh(fn: Callable[..., Any], mesh: Mesh, in_specs: tuple[Any, ...], out_specs: Any) -> Callable[..., Any]:
    """`fn` mapped over the ranks of a mesh: `jax.shard_map` with these arguments, by vmap."""

    def run(*args: Any) -> Any:
        # As shard_map does: PartitionSpecs in `fn` refer to this mesh.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), setting(_axes_of_ranks, data_axes(mesh)):
            return fn(*args)

    _map_by_rank()
    for axis in reversed(data_axes(mesh)):
        run = jax.vmap(
            run,
            in_axes=_each(lambda spec, axis=axis: _dim(spec, axis), in_specs),
            out_axes=_each(lambda spec, axis=axis: _dim(spec, axis), out_specs),
            axis_name=axis,
            axis_size=mesh.shape[axis],
            spmd_axis_name=axis,
        )

    def call(*args: Any) -> Any:
        split = _on_leaves(lambda spec, leaf: _split(leaf, spec, mesh), in_specs, args)
        partitions = _on_leaves(lambda spec, leaf: _partition(leaf, spec), in_specs, args)
        found = run(*(split if model_axes(mesh) else _row_major(split, partitions, mesh)))
        return _on_leaves(lambda spec, leaf: _joined(leaf, spec, mesh), out_specs, found)

    return call


@functools.cache
def _map_by_rank() -> None:
    """Replace the rules by which vmap maps these primitives: over ranks they are under shard_map, see [Note: operations of one
    rank]."""
    for primitive in (jax.lax.conv_general_dilated_p, jax.lax.fft_p):
        batching.fancy_primitive_batchers[primitive] = _rule_by_rank(primitive)


def _rule_by_rank(primitive: Any) -> Callable[..., Any]:
    own = batching.fancy_primitive_batchers.get(primitive)
    if own is None:
        plain = batching.primitive_batchers[primitive]  # type: ignore[index]  # a view of two tables
        own = lambda axis, args, dims, **params: plain(args, dims, **params)  # noqa: E731

    def rule(axis: Any, args: Any, dims: Any, **params: Any) -> tuple[jax.Array, int | None]:
        ranks = _axes_of_ranks.get()
        if axis.name not in ranks or all(dim is None for dim in dims):
            return own(axis, args, dims, **params)
        by_rank = [arg if dim is None else jnp.moveaxis(arg, dim, 0) for arg, dim in zip(args, dims, strict=True)]
        axes = [() if dim is None else (axis.name,) for dim in dims]
        operate = functools.partial(primitive.bind, **params)

        def on_ranks(*arrays: jax.Array) -> jax.Array:
            return _on_ranks(operate, arrays, axes, ranks)

        if axis.name == ranks[0]:  # the outermost
            return on_ranks(*by_rank), 0
        mapped = custom_vmap(on_ranks)

        @mapped.def_vmap
        def over_replicas(_: int, has_replicas: list[bool], *arrays: jax.Array) -> tuple[jax.Array, bool]:
            both = [(*ranks[:1] * has, *inner) for has, inner in zip(has_replicas, axes, strict=True)]
            return _on_ranks(operate, arrays, both, ranks), True

        return mapped(*by_rank), 0

    return rule


def _on_ranks(
    fn: Callable[..., jax.Array], arrays: Sequence[jax.Array], axes: Sequence[tuple[str, ...]], ranks: tuple[str, ...]
) -> jax.Array:
    """`fn` of each rank's part of arrays.

    Args:
        axes: for each array, the axes of its leading dims.
        ranks: all axes of ranks.

    Returns:
        The results, with a leading dim for each axis of any array, in the order of the mesh.
    """
    of_result = tuple(name for name in ranks if any(name in each for each in axes))

    def on_rank(*parts: jax.Array) -> jax.Array:
        result = fn(*(part.reshape(part.shape[len(each) :]) for part, each in zip(parts, axes, strict=True)))
        return result.reshape((1,) * len(of_result) + result.shape)

    specs = tuple(P(*each) for each in axes)
    return jax.shard_map(on_rank, in_specs=specs, out_specs=P(*of_result), axis_names=set(of_result), check_vma=False)(
        *arrays
    )


def _is_spec(node: Any) -> bool:
    return isinstance(node, P)


def _each(function: Callable[[P], Any], specs: Any) -> Any:
    return jax.tree.map(function, specs, is_leaf=_is_spec)


def _on_leaves(function: Callable[[P, Any], Any], specs: Any, tree: Any) -> Any:
    """Apply a function to each leaf with its spec; specs are a prefix of the tree."""
    at_subtree = lambda spec, subtree: jax.tree.map(lambda leaf: function(spec, leaf), subtree)  # noqa: E731
    return jax.tree.map(at_subtree, specs, tree, is_leaf=_is_spec)


def _dim(spec: P, axis: str) -> int | None:
    """The dim on which an axis of the mesh is mapped; None if the array is not sharded over it."""
    return next((dim for dim, entry in enumerate(spec) if axis in axes_of(entry)), None)


def _split(array: Any, spec: P, mesh: Mesh) -> jax.Array:
    """The array with dims for the mesh axes before each dim that is sharded over them."""
    shape = []
    for dim, size in enumerate(array.shape):
        sizes = [mesh.shape[axis] for axis in (axes_of(spec[dim]) if dim < len(spec) else ())]
        shape += [*sizes, size // math.prod(sizes)]
    return _constrained(array.reshape(shape), mesh, _partition(array, spec))


def _partition(array: Any, spec: P) -> P:
    """The PartitionSpec of a split array."""
    entries = (*spec, *(None,) * (array.ndim - len(spec)))
    return P(*(each for entry in entries for each in (*axes_of(entry), None)))


def _row_major(arrays: Any, partitions: Any, mesh: Mesh) -> Any:
    """Constrain split arrays to the row-major layout on each device.

    The dim of ranks has size 1 on a device, so its place in the layout makes no difference in memory. Up to JAX 0.11.2 XLA's CPU
    compiler nevertheless makes it the major dim, and then copies the array to the layout in which a loop reads it: the shards of
    all layers of a scan, at every step. With model axes this is not used: XLA gathers an array with a layout constraint.
    """
    leaves, structure = jax.tree.flatten(arrays)
    specs = jax.tree.leaves(partitions, is_leaf=_is_spec)
    at = [i for i, spec in enumerate(specs) if any(spec[1:])]
    if not at:
        return arrays
    own = tuple(specs[i] for i in at)

    def constrained(*parts: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(with_layout_constraint(part, Layout(tuple(range(part.ndim)))) for part in parts)

    laid_out = jax.shard_map(constrained, mesh=mesh, in_specs=own, out_specs=own, check_vma=False)
    for i, leaf in zip(at, laid_out(*(leaves[i] for i in at)), strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(structure, leaves)


def _joined(array: jax.Array, spec: P, mesh: Mesh) -> jax.Array:
    """The inverse of `_split`."""
    shape, sizes = [], list(array.shape)
    for entry in spec:
        num_axes = len(axes_of(entry))
        shape.append(math.prod(sizes[: num_axes + 1]))
        del sizes[: num_axes + 1]
    return _constrained(array.reshape((*shape, *sizes)), mesh, spec)


def _constrained(array: jax.Array, mesh: Mesh, spec: P) -> jax.Array:
    if model_axes(mesh):
        spec = P(*(entry or P.UNCONSTRAINED for entry in (*spec, *(None,) * (array.ndim - len(spec)))))
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))
