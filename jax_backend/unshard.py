"""Full parameters for the user (`unshard`), and the way back (`writeback`, R20)."""

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from crossframe.errors import UsageError
from jax_backend.collectives import all_gather
from jax_backend.sharded import ShardedParams, from_lines, mesh_of


def unshard(sharded: ShardedParams) -> Any:
    """The full parameters, in the user's own structure, shapes and axis order; every device holds all of them.

    Works on gradients and on an optimizer's moments as well. Editing the result changes no shard: see `writeback`.

    Raises:
        UsageError: called inside jit or grad, or on something else.
    """
    return _unshard(sharded, mesh_of(sharded))


@functools.partial(jax.jit, static_argnums=1)
def _unshard(sharded: ShardedParams, mesh: Mesh) -> Any:
    tree, buckets = sharded.tree, sharded.buckets
    lacking = [bucket.name for bucket in tree.buckets if bucket.name not in buckets]
    if lacking:
        raise UsageError(
            f"the shards lack what is frozen, {lacking}: pass all parameters, params.with_trainable(trained)"
        )

    def on_rank(buckets: dict[str, Any]) -> Any:
        lines = {name: tree.by_name[name].to_line(each) for name, each in buckets.items()}
        return tree.params({name: all_gather(line, tree.by_name[name].label) for name, line in lines.items()})

    # check_vma=False: that every rank holds the same after an all-gather is known here, but not provable to JAX.
    specs = (tree.partitions(buckets),)
    return jax.shard_map(on_rank, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)(buckets)


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
    devices = list(mesh.devices.flat)

    def read(name: str, rank: int) -> np.ndarray:
        leaf = leaves[sharded.tree.param_map.by_name[name].path]
        if isinstance(leaf, jax.Array) and leaf.is_fully_replicated:
            for part in leaf.addressable_shards:
                if part.device == devices[rank]:
                    return np.asarray(part.data)
        return np.asarray(leaf)

    return from_lines(sharded.tree, mesh, read)
