"""The mesh of devices: ranks (R10) as a jax Mesh, trees with a value for each rank, and random keys folded with the rank.

[Note: data axes and model axes] Ranks are coordinates of the data axes, "replicate" and "shard". Further axes, such as "tp", are
model axes: the devices of a rank along them share its batch and divide its computation. XLA partitions over them, by the
partitions of parameters and by the constraints in the loss function. Nothing else knows of them: a rank's part of an array, its
gradient and its collectives are the same as on a mesh without model axes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from crossframe.errors import UsageError
from crossframe.mesh import MeshSpec
from jax_backend.mesh._device_order import ordered_devices

SHARD_AXIS = "shard"
REPLICATE_AXIS = "replicate"
_DATA_AXES = (REPLICATE_AXIS, SHARD_AXIS)


def make_mesh(
    spec: MeshSpec, devices: Sequence[Any] | None = None, *, model_axes: Mapping[str, int] | None = None
) -> Mesh:
    """The mesh on which rank i is device i, or the i-th group of devices if there are model axes.

    Args:
        spec: the grid of ranks.
        devices: the devices in rank order, those of a rank next to each other; the first ones are used. Default: `jax.devices()`,
            on TPUs in the order that `jax.make_mesh` gives them by their topology. That order was never tried on TPUs.
        model_axes: the sizes of further axes by name, such as {"tp": 2} for tensor parallelism, the outermost first. The devices
            of a rank along them work on one batch; see `model_partition` of `shard`.

    Returns:
        A mesh with the axes ("replicate", "shard"), or ("shard",) if there is one replica, followed by the model axes, of Auto
        type. Axes of jax.make_mesh are Explicit, and arrays on them cannot be reshaped between flat shards and parameters.

    Raises:
        UsageError: fewer devices than the mesh has, or invalid model axes.
    """
    if not isinstance(spec, MeshSpec):
        raise UsageError(f"spec: expected a MeshSpec, got {type(spec).__name__}; for 4 ranks pass MeshSpec(shard=4)")
    further = _checked_axes(model_axes)
    axes = {**({REPLICATE_AXIS: spec.replicate} if spec.replicate > 1 else {}), SHARD_AXIS: spec.shard, **further}
    size = math.prod(axes.values())
    shape = tuple(axes.values())
    given = jax.devices() if devices is None else list(devices)
    if len(given) < size:
        raise UsageError(
            f"expected at least {size} devices for a mesh of {spec.replicate} x {spec.shard} ranks"
            f"{f' and the model axes {further}' if further else ''}, got {len(given)}; for more CPU devices call "
            f"jax.config.update('jax_num_cpu_devices', {size}) before JAX is first used"
        )
    grid = ordered_devices(given, shape) if devices is None else np.array(given[:size], dtype=object).reshape(shape)
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def _checked_axes(model_axes: Mapping[str, int] | None) -> dict[str, int]:
    if model_axes is not None and not isinstance(model_axes, Mapping):
        raise UsageError(
            f"model_axes: expected the sizes of axes by name, such as {{'tp': 2}}, got {type(model_axes).__name__}"
        )
    for name, size in (model_axes or {}).items():
        if not isinstance(name, str) or name in _DATA_AXES:
            raise UsageError(
                f"model_axes: expected names other than {' and '.join(map(repr, _DATA_AXES))}, got {name!r}; the data axes are "
                "sized by the MeshSpec"
            )
        if type(size) is not int or size < 1:
            raise UsageError(f"model_axes: expected a size of at least 1 for {name!r}, got {size!r}")
    return dict(model_axes or {})


def check_mesh(mesh: Mesh) -> None:
    """Raise UsageError unless this is a mesh of `make_mesh`: "shard", or "replicate" and "shard", then model axes, all Auto."""
    if not isinstance(mesh, Mesh):
        raise UsageError(f"expected a jax Mesh, got {type(mesh).__name__}; make one with jax_backend.make_mesh")
    if mesh.axis_names != (*data_axes(mesh), *model_axes(mesh)) or set(mesh.axis_types) != {AxisType.Auto}:
        axes = ", ".join(f"{name!r} ({kind})" for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True))
        raise UsageError(
            f"expected a mesh with the first axis 'shard', or the first axes 'replicate' and 'shard', of type Auto, got {axes}; "
            "make it with jax_backend.make_mesh, with further axes as its model_axes"
        )


def data_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes of ranks, the outermost first; see [Note: data axes and model axes]."""
    return _DATA_AXES if REPLICATE_AXIS in mesh.axis_names else (SHARD_AXIS,)


def model_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes along which the devices of a rank are; () if each rank has one."""
    return tuple(name for name in mesh.axis_names if name not in _DATA_AXES)


def model_axis_sizes(mesh: Mesh) -> dict[str, int]:
    """The sizes of the model axes by name."""
    return {name: mesh.shape[name] for name in model_axes(mesh)}


def mesh_spec(mesh: Mesh) -> MeshSpec:
    """The grid of ranks of a mesh."""
    return MeshSpec(shard=mesh.shape[SHARD_AXIS], replicate=mesh.shape.get(REPLICATE_AXIS, 1))


def num_ranks(mesh: Mesh) -> int:
    """Number of ranks, replicas included."""
    return mesh_spec(mesh).world_size


def axes_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one dim of a PartitionSpec."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def rank_partition(mesh: Mesh) -> P:
    """The partition of a leading dim whose i-th part is on rank i."""
    return P(data_axes(mesh))


def devices_of(mesh: Mesh, rank: int) -> list[Any]:
    """The devices of a rank, in the order of the mesh."""
    return list(mesh.devices.reshape(num_ranks(mesh), -1)[rank])


def device_of(mesh: Mesh, rank: int) -> Any:
    """The first device of a rank."""
    return devices_of(mesh, rank)[0]


def ranks_here(mesh: Mesh) -> list[int]:
    """The ranks that have a device in this process."""
    here = jax.process_index()
    return [
        rank for rank in range(num_ranks(mesh)) if any(each.process_index == here for each in devices_of(mesh, rank))
    ]


def per_rank(tree: PyTree, mesh: Mesh) -> PyTree[jax.Array]:
    """Give every rank its own copy of each leaf, as `value_and_grad` expects state.

    Typed PRNG keys are folded with the rank, so that ranks draw different numbers. Raw uint32 keys, which look like counters, are
    copied.

    Args:
        tree: a pytree of arrays of any shape and dtype.
        mesh: the ranks.

    Returns:
        The same tree; a leaf of shape (...) becomes one of shape (num_ranks, ...), its leading axis sharded over ranks.
    """
    ranks = num_ranks(mesh)
    sharding = NamedSharding(mesh, rank_partition(mesh))

    def spread(leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            keys = leaf.reshape(-1)
            fold = jax.vmap(jax.vmap(jax.random.fold_in, (0, None)), (None, 0))
            return jax.device_put(fold(keys, jnp.arange(ranks)).reshape(ranks, *leaf.shape), sharding)
        return jax.device_put(jnp.broadcast_to(leaf, (ranks, *leaf.shape)), sharding)

    return jax.tree.map(spread, tree)
