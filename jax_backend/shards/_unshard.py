"""Full parameters for the user (`unshard`), and the way back (`writeback`, R20)."""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from crossframe.errors import UsageError
from jax_backend.mesh._device_mesh import device_of, mesh_spec
from jax_backend.mesh._shard_map import mapped
from jax_backend.ranks._collectives import all_gather
from jax_backend.shards._bucket import Bucket
from jax_backend.shards._sharded_params import ShardedParams, line_of, mesh_of


def unshard(sharded: ShardedParams) -> Any:
    """The full parameters, in the user's own structure, shapes and axis order; every device holds all of them.

    Works on gradients and on an optimizer's moments as well. Editing the result changes no shard: see `writeback`, and
    `summon_full_params` for both in one.

    Raises:
        UsageError: called inside jit or grad, or on something else.
    """
    mesh = mesh_of(sharded)
    check_there(sharded, sharded.tree.buckets)
    return gathered(sharded, mesh, tuple(bucket.name for bucket in sharded.tree.buckets))


def check_there(sharded: ShardedParams, buckets: Iterable[Bucket]) -> None:
    """Raise UsageError unless the arrays of these buckets are there, of frozen ones too."""
    if lacking := [bucket.name for bucket in buckets if bucket.name not in sharded.buckets]:
        raise UsageError(
            f"the shards lack what is frozen, {lacking}: pass all parameters, params.with_trainable(trained)"
        )


@partial(jax.jit, static_argnums=(1, 2))
def gathered(sharded: ShardedParams, mesh: Mesh, names: tuple[str, ...]) -> Any:
    """The user's pytree with the parameters of these buckets, and None in the place of all others."""
    tree = sharded.tree
    absent = {bucket.name: dict.fromkeys(tree.paths_of(bucket)) for bucket in tree.buckets}

    def on_rank(buckets: dict[str, Any]) -> Any:
        lines = {name: tree.by_name[name].to_line(each) for name, each in buckets.items()}
        return tree.params(absent | {name: all_gather(line, tree.by_name[name].label) for name, line in lines.items()})

    buckets = {name: sharded.buckets[name] for name in names}
    # check_vma=False: that every rank holds the same after an all-gather is known here, but not provable to JAX.
    specs = (tree.partitions(buckets),)
    return mapped(on_rank, mesh, specs, P())(buckets)


def writeback(sharded: ShardedParams, full_params: Any) -> ShardedParams:
    """New shards of full parameters: each rank takes the unpadded slice that it owns, and nothing else (R20).

    A leaf that lies on the mesh's devices is read on each rank's own device: ranks that hold different values of a
    replicated array merge slice by slice. Padding of the result is 0. The shards passed in are left as they are.

    Args:
        full_params: a pytree like the one that `unshard` returns, of numpy or JAX arrays.

    Raises:
        UsageError: another structure, shape or dtype, by name; or a call inside jit or grad.
    """
    mesh = mesh_of(sharded)
    leaves = sharded.tree.leaves(full_params)
    return written(sharded, mesh, sharded.buckets, leaves, range(mesh.size))


def written(
    sharded: ShardedParams, mesh: Mesh, names: Collection[str], leaves: Mapping[str, Any], ranks: Collection[int]
) -> ShardedParams:
    """The shards, of which these ranks have taken what they own of these buckets from full leaves (R20).

    Args:
        names: of the buckets.
        leaves: by path, once they fit.
        ranks: those that write, replicas included. If replicas write different values their shards differ from then on.
    """
    tree, spec = sharded.tree, mesh_spec(mesh)

    def own(bucket: Bucket, arrays: Any, rank: int) -> Any:
        device = device_of(mesh, rank)
        if rank not in ranks:
            return jax.tree.map(partial(part_on, device), arrays)
        line = line_of(tree, bucket, spec.coordinate(rank)[1], _reader(leaves, device))
        return jax.tree.map(lambda part, old: part.astype(old.dtype), bucket.from_line(line), arrays)

    changed = {
        name: tree.by_name[name].assembled(mesh, partial(own, tree.by_name[name], arrays))
        for name, arrays in sharded.buckets.items()
        if name in names
    }
    return ShardedParams.of(tree, sharded.buckets | changed)


def part_on(device: Any, array: jax.Array) -> jax.Array:
    """What one device of this process holds of an array."""
    return next(part.data for part in array.addressable_shards if part.device == device)


def _reader(leaves: Mapping[str, Any], device: Any) -> Callable[[str, int], np.ndarray]:
    def read(path: str, place: int) -> np.ndarray:
        leaf = leaves[path]
        if isinstance(leaf, jax.Array) and leaf.is_fully_replicated and device in leaf.sharding.addressable_devices:
            return np.asarray(part_on(device, leaf))
        return np.asarray(leaf)

    return read
