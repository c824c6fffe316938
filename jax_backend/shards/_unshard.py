"""Full parameters for the user (`unshard`), and their way back into shards (`writeback`, R20)."""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from crossframe.errors import UsageError
from jax_backend.mesh._device_mesh import device_of, mesh_spec, num_ranks
from jax_backend.mesh._rank_parts import part_of_rank
from jax_backend.mesh._shard_map import mapped
from jax_backend.ranks._collectives import all_gather
from jax_backend.shards._bucket import Bucket
from jax_backend.shards._sharded_params import ShardedParams, line_of, mesh_of


def unshard(sharded: ShardedParams) -> PyTree[jax.Array]:
    """The full parameters, in the user's own structure, shapes and axis order; every device holds all of them.

    Gradients and an optimizer's moments are accepted too. Edits of the result change no shard; see `writeback` and
    `summon_full_params`.

    Raises:
        UsageError: a call inside jit or grad, or on something else.
    """
    mesh = mesh_of(sharded)
    check_there(sharded, sharded.tree.buckets)
    return gathered(sharded, mesh, tuple(bucket.name for bucket in sharded.tree.buckets))


def check_there(sharded: ShardedParams, buckets: Iterable[Bucket]) -> None:
    """Raise UsageError unless the arrays of these buckets are there, including frozen ones."""
    if lacking := [bucket.name for bucket in buckets if bucket.name not in sharded.buckets]:
        raise UsageError(
            f"the frozen buckets {lacking} are missing: pass all parameters, params.with_trainable(trained)"
        )


@partial(jax.jit, static_argnums=(1, 2))
def gathered(sharded: ShardedParams, mesh: Mesh, names: tuple[str, ...]) -> PyTree[jax.Array]:
    """The user's pytree with the parameters of these buckets, and None instead of all others."""
    tree = sharded.tree
    absent = {bucket.name: dict.fromkeys(tree.paths_of(bucket)) for bucket in tree.buckets}

    def on_rank(buckets: dict[str, Any]) -> Any:
        lines = {name: tree.by_name[name].to_line(each) for name, each in buckets.items()}
        return tree.params(absent | {name: all_gather(line, tree.by_name[name].label) for name, line in lines.items()})

    buckets = {name: sharded.buckets[name] for name in names}
    specs = (tree.rank_partitions(buckets),)
    return mapped(on_rank, mesh, specs, P())(buckets)


def writeback(sharded: ShardedParams, full_params: PyTree[jax.Array]) -> ShardedParams:
    """New shards from full parameters: each rank takes the unpadded slice that it owns, and nothing else (R20).

    A leaf on the mesh's devices is read on each rank's own device: if ranks have different values of a replicated array, each
    writes its slice. Padding of the result is 0. The shards passed in do not change.

    Args:
        full_params: a pytree like that of `unshard`, of numpy or JAX arrays.

    Raises:
        UsageError: another structure, shape or dtype, by name; or a call inside jit or grad.
    """
    mesh = mesh_of(sharded)
    leaves = sharded.tree.leaves(full_params)
    return written(sharded, mesh, sharded.buckets, leaves, range(num_ranks(mesh)))


def written(
    sharded: ShardedParams, mesh: Mesh, names: Collection[str], leaves: Mapping[str, Any], ranks: Collection[int]
) -> ShardedParams:
    """The shards after these ranks have taken their slices of these buckets from full leaves (R20).

    Args:
        names: names of the buckets.
        leaves: checked leaves by path.
        ranks: the ranks that write, replicas included. If replicas write different values, their shards differ from then on.
    """
    tree, spec = sharded.tree, mesh_spec(mesh)

    def own(bucket: Bucket, arrays: Any, rank: int) -> Any:
        if rank not in ranks:
            return jax.tree.map(lambda array: part_of_rank(array, mesh, rank), arrays)
        line = line_of(tree, bucket, spec.coordinate(rank)[1], _reader(leaves, device_of(mesh, rank)))
        return jax.tree.map(lambda part, old: part.astype(old.dtype), bucket.from_line(line), arrays)

    changed = {
        name: tree.by_name[name].assembled(mesh, partial(own, tree.by_name[name], arrays))
        for name, arrays in sharded.buckets.items()
        if name in names
    }
    return ShardedParams.of(tree, sharded.buckets | changed)


def part_on(device: Any, array: jax.Array) -> jax.Array:
    """The part of an array on one device of this process."""
    return next(part.data for part in array.addressable_shards if part.device == device)


def _reader(leaves: Mapping[str, Any], device: Any) -> Callable[[str, int], np.ndarray]:
    def read(path: str, place: int) -> np.ndarray:
        leaf = leaves[path]
        if isinstance(leaf, jax.Array) and leaf.is_fully_replicated and device in leaf.sharding.addressable_devices:
            return np.asarray(part_on(device, leaf))
        return np.asarray(leaf)

    return read
