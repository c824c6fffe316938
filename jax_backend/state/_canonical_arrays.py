"""Parts of a checkpoint as arrays by canonical name, in true shapes and canonical axis order, and back."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_backend.mesh._device_mesh import SHARD_AXIS
from jax_backend.shards._bucket import Bucket
from jax_backend.state._checkpoint_parts import Part

# (bucket, axes of the part), which determine a program.
_Form = tuple[Bucket, tuple[int, ...] | None]


def canonical_structs(part: Part) -> dict[str, jax.ShapeDtypeStruct]:
    """What `canonical_arrays` returns, without values."""
    dtype = jax.tree.leaves(part.arrays)[0].dtype
    return {
        spec.name: jax.ShapeDtypeStruct(spec.shape, dtype, sharding=canonical_sharding(spec.shape, part.mesh))
        for _, layout in part.units
        for spec in layout.params
    }


def canonical_arrays(part: Part) -> dict[str, jax.Array]:
    """The arrays of a part by their names in a checkpoint; of a stacked unit, one for each layer. All processes call it."""
    structs = canonical_structs(part)
    shardings = tuple(struct.sharding for struct in structs.values())
    return dict(zip(structs, _to_canonical((part.bucket, part.axes), shardings, part.arrays), strict=True))


def from_canonical_arrays(part: Part, found: Mapping[str, jax.Array]) -> Any:
    """Arrays like those of a part with the values of canonical ones. All processes call it."""
    shardings = jax.tree.map(lambda array: array.sharding, part.arrays)
    leaves, structure = jax.tree.flatten(shardings)
    given = [found[name] for name in canonical_structs(part)]
    return jax.tree.unflatten(structure, _from_canonical((part.bucket, part.axes), tuple(leaves), given))


def canonical_sharding(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """The sharding of a canonical array: on its largest dim that the ranks divide; if there is none, replicated."""
    ranks = mesh.shape[SHARD_AXIS]
    dims = [dim for dim, size in enumerate(shape) if size and size % ranks == 0]
    if not dims:
        return NamedSharding(mesh, P())
    return NamedSharding(mesh, P(*(None,) * max(dims, key=lambda dim: shape[dim]), SHARD_AXIS))


@partial(jax.jit, static_argnums=(0, 1))
def _to_canonical(form: _Form, shardings: tuple[NamedSharding, ...], arrays: Any) -> list[jax.Array]:
    bucket, axes = form
    if axes is not None:
        arrays = jax.tree.map(lambda array: array.transpose(axes), arrays)
    named = bucket.to_params(arrays)
    by_layer = [bucket.layers.split(named[spec.name]) for spec in bucket.layout.params]
    found = [array for layer in zip(*by_layer, strict=True) for array in layer]
    return [jax.lax.with_sharding_constraint(*each) for each in zip(found, shardings, strict=True)]


@partial(jax.jit, static_argnums=(0, 1))
def _from_canonical(form: _Form, shardings: tuple[NamedSharding, ...], given: list[jax.Array]) -> list[jax.Array]:
    bucket, axes = form
    num = len(bucket.layout.params)
    named = {spec.name: bucket.layers.join(given[i::num]) for i, spec in enumerate(bucket.layout.params)}
    arrays = jax.tree.leaves(bucket.from_params(named))
    if axes is not None:
        arrays = [array.transpose(np.argsort(axes)) for array in arrays]
    return [jax.lax.with_sharding_constraint(*each) for each in zip(arrays, shardings, strict=True)]
