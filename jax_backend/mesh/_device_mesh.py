"""The mesh of devices: ranks (R10) as a jax Mesh, trees with a value for each rank, and random keys folded with the rank."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from crossframe.errors import UsageError
from crossframe.mesh import MeshSpec

SHARD_AXIS = "shard"
REPLICATE_AXIS = "replicate"
_AXES = ((SHARD_AXIS,), (REPLICATE_AXIS, SHARD_AXIS))


def make_mesh(spec: MeshSpec, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh on which rank i is device i.

    Args:
        spec: the grid of ranks.
        devices: the devices in rank order; the first `spec.world_size` are used. Default: `jax.devices()`.

    Returns:
        A mesh with the axes ("replicate", "shard"), or ("shard",) if there is one replica, of Auto type. Axes of jax.make_mesh
        are Explicit, and arrays on them cannot be reshaped between flat shards and parameters.

    Raises:
        UsageError: fewer devices than ranks.
    """
    if not isinstance(spec, MeshSpec):
        raise UsageError(f"spec: expected a MeshSpec, got {type(spec).__name__}; for 4 ranks pass MeshSpec(shard=4)")
    devices = jax.devices() if devices is None else list(devices)
    if len(devices) < spec.world_size:
        raise UsageError(
            f"expected at least {spec.world_size} devices for a mesh of {spec.replicate} x {spec.shard} ranks, got "
            f"{len(devices)}; for more CPU devices call jax.config.update('jax_num_cpu_devices', {spec.world_size}) before "
            "JAX is first used"
        )
    grid = np.array(devices[: spec.world_size], dtype=object)
    if spec.replicate == 1:
        return Mesh(grid, (SHARD_AXIS,), axis_types=(AxisType.Auto,))
    shape = (spec.replicate, spec.shard)
    return Mesh(grid.reshape(shape), (REPLICATE_AXIS, SHARD_AXIS), axis_types=(AxisType.Auto,) * 2)


def check_mesh(mesh: Mesh) -> None:
    """Raise UsageError unless this is a mesh of `make_mesh`, with the axes "shard", or "replicate" and "shard", of Auto type."""
    if not isinstance(mesh, Mesh):
        raise UsageError(f"expected a jax Mesh, got {type(mesh).__name__}; make one with jax_backend.make_mesh")
    if mesh.axis_names not in _AXES or set(mesh.axis_types) != {AxisType.Auto}:
        axes = ", ".join(f"{name!r} ({kind})" for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True))
        raise UsageError(
            f"expected a mesh with the axis 'shard', or the axes 'replicate' and 'shard', of type Auto, got {axes}; make it "
            "with jax_backend.make_mesh"
        )


def mesh_spec(mesh: Mesh) -> MeshSpec:
    """The grid of ranks of a mesh."""
    return MeshSpec(shard=mesh.shape[SHARD_AXIS], replicate=mesh.shape.get(REPLICATE_AXIS, 1))


def num_ranks(mesh: Mesh) -> int:
    """Number of ranks, replicas included."""
    return mesh.size


def rank_partition(mesh: Mesh) -> P:
    """The partition of a leading dim whose i-th part is on rank i."""
    return P(mesh.axis_names)


def device_of(mesh: Mesh, rank: int) -> Any:
    """The device of a rank."""
    return mesh.devices.flat[rank]


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
