"""shard_map as the engine uses it."""

from collections.abc import Callable, Collection
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jax_backend.mesh._device_mesh import axes_of


def mapped(
    fn: Callable[..., Any],
    mesh: Mesh,
    in_specs: tuple[Any, ...],
    out_specs: Any,
    axes: Collection[str] | None = None,
) -> Callable[..., Any]:
    """`jax.shard_map` without `check_vma`, in which empty arrays are made inside.

    XLA's CPU compiler in jaxlib 0.11.2 crashes if a program over several devices takes an empty array beside others.

    Args:
        axes: the axes that it maps over; XLA partitions over the others. None: all.
    """
    return _mapped(fn, mesh, in_specs, out_specs, frozenset(mesh.axis_names if axes is None else axes))


def mapped_inside(
    fn: Callable[[jax.Array], jax.Array], spec: P, axes: Collection[str]
) -> Callable[[jax.Array], jax.Array]:
    """A function of one array, inside a function that is mapped over other axes: mapped over these axes too.

    [Note: collectives run on parts] XLA's partitioner does not divide a collective over ranks along the axes that are left to
    it: it gathers the operand along them first. So a collective is mapped over these axes too, and moves a device's own part.

    Args:
        spec: the partition over these axes of the argument, and of the result.
    """
    return _mapped(fn, jax.sharding.get_abstract_mesh(), (spec,), spec, frozenset(axes))


def _mapped(
    fn: Callable[..., Any], mesh: Mesh | AbstractMesh, in_specs: tuple[Any, ...], out_specs: Any, axes: frozenset[str]
) -> Callable[..., Any]:

    def call(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        is_spec = lambda node: isinstance(node, P)  # noqa: E731
        specs = jax.tree.leaves(
            jax.tree.map(lambda spec, some: jax.tree.map(lambda _: spec, some), in_specs, args, is_leaf=is_spec),
            is_leaf=is_spec,
        )
        empty = {i: jnp.shape(leaf) for i, leaf in enumerate(leaves) if not prod(jnp.shape(leaf))}

        def whole(*given: jax.Array) -> Any:
            others = iter(given)
            found = [
                jnp.zeros(_local(empty[i], specs[i], mesh), leaf.dtype) if i in empty else next(others)
                for i, leaf in enumerate(leaves)
            ]
            return fn(*jax.tree.unflatten(structure, found))

        rest = [i for i in range(len(leaves)) if i not in empty]
        at = tuple(specs[i] for i in rest)
        run = jax.shard_map(whole, mesh=mesh, in_specs=at, out_specs=out_specs, axis_names=axes, check_vma=False)
        return run(*(leaves[i] for i in rest))

    return call


def _local(shape: tuple[int, ...], spec: P, mesh: Mesh | AbstractMesh) -> tuple[int, ...]:
    """The shape of one rank's part."""
    axes = [*spec, *(None,) * (len(shape) - len(spec))]
    parts = [prod(mesh.shape[name] for name in axes_of(entry)) for entry in axes]
    return tuple(size // part for size, part in zip(shape, parts, strict=True))
