"""ShardedParams: the shards of all units as one pytree, with the layouts as static data."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from crossframe.dtypes import numpy_dtype
from crossframe.errors import UsageError
from crossframe.layout import Layout
from crossframe.mesh import check_rank
from crossframe.names import ParamMap
from crossframe.writeback import writeback_copies
from jax_backend.mesh import SHARD_AXIS, check_mesh, num_ranks
from jax_backend.tree import ParamTree, build_tree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ShardedParams:
    """Parameters, or their gradients, or an optimizer's moments of them, as shards.

    A pytree: jax.tree and those of optax's transformations that look at single elements or at the global norm work on it as on
    any other. A leaf is a whole unit in one line: what goes by a leaf's shape or name (a mask on ndim, LAMB's trust ratios)
    sees other leaves than the parameters. Nothing is validated here, since transformations put masks,
    shapes and None where the arrays are.

    Attributes:
        shards: one array a unit, of shape (gathered_numel,), sharded over the mesh axis "shard": the part of device i,
            of shape (padded_shard_numel,), is bit for bit the shard of rank i, in canonical (torch's) order of
            parameters and of axes. Padding holds 0 (R05).
        tree: where every parameter lies. Static.
    """

    shards: dict[str, Any]
    tree: ParamTree = field(metadata={"static": True})


def shard(
    params: Any,
    mesh: Mesh,
    *,
    units: Iterable[str] = (),
    param_map: ParamMap | None = None,
    keep_original: bool = True,
    unit_layouts: Mapping[str, Layout] | None = None,
) -> ShardedParams:
    """Shard full parameters.

    Args:
        params: a pytree of floating arrays (numpy or JAX); nested dicts, lists and nnx.State are fine.
        mesh: from `make_mesh`.
        units: canonical names of the modules that are units; the root "" is one whether named or not. A parameter
            belongs to the nearest enclosing unit, and stands inside it in the order of the map.
        param_map: canonical names, order and axis orders. Default: the pytree's own paths, order and axes.
        keep_original: whether the flat layout aligns parameters and pads its tail (R02, R03).
        unit_layouts: layouts by unit to use instead of those computed here, for instance torch's own; their parameters
            may stand in any order.

    Returns:
        The shards; no device ever holds more than its own.

    Raises:
        UsageError: a leaf that is no floating array, or a mesh that `make_mesh` did not make.
        MappingError: a map that does not fit the pytree.
        UnitError: a unit that is no module.
        LayoutError: mixed dtypes in one unit, or a layout of other parameters or of another world size.
    """
    check_mesh(mesh)
    if isinstance(units, str):
        raise UsageError(f"units: expected names in a tuple or list, got the string {units!r}; pass ({units!r},)")
    tree = build_tree(
        params,
        num_ranks(mesh),
        units=units,
        param_map=param_map,
        keep_original=keep_original,
        unit_layouts=unit_layouts,
    )
    leaves = tree.leaves(params)
    return from_lines(tree, mesh, lambda name, rank: np.asarray(leaves[tree.param_map.by_name[name].path]))


def from_lines(tree: ParamTree, mesh: Mesh, read: Callable[[str, int], np.ndarray]) -> ShardedParams:
    """Build the shards of every rank that this process holds.

    Args:
        read: (canonical name, rank) to that rank's value of the parameter, in the user's axis order.
    """

    def buffer(layout: Layout, rank: int) -> np.ndarray:
        shard = np.zeros(layout.padded_shard_numel, numpy_dtype(layout.dtype))
        for copy in writeback_copies(layout, rank):
            name = layout.params[copy.index].name
            line = tree.param_map.by_name[name].to_canonical(read(name, rank)).reshape(-1)
            shard[copy.shard_start : copy.shard_stop] = line[copy.param_start : copy.param_stop]
        return shard

    def array(layout: Layout) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            return buffer(layout, rank_of(index, layout))

        sharding = NamedSharding(mesh, P(SHARD_AXIS))
        return jax.make_array_from_callback((layout.gathered_numel,), sharding, part)

    return ShardedParams({unit: array(layout) for unit, layout in tree.units}, tree)


def rank_of(index: tuple[slice, ...], layout: Layout) -> int:
    """The rank whose shard lies at this index of a unit's array."""
    return (index[0].start or 0) // max(1, layout.padded_shard_numel)


def mesh_of(sharded: ShardedParams) -> Mesh:
    """The mesh that the shards lie on; UsageError inside a transformation, where arrays lie nowhere yet."""
    if not isinstance(sharded, ShardedParams):
        raise UsageError(f"expected ShardedParams, got {type(sharded).__name__}; make them with jax_backend.shard")
    array = next(iter(sharded.shards.values()))
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        raise UsageError(
            f"expected shards that lie on the devices of a mesh, got {type(array).__name__}; "
            "call this outside jit and grad, on what shard or value_and_grad returned"
        )
    return sharding.mesh


def shards_of(sharded: ShardedParams, rank: int) -> dict[str, np.ndarray]:
    """One rank's shard of every unit, of shape (padded_shard_numel,), padding included.

    Raises:
        MeshError: a rank that does not exist.
        UsageError: a rank whose device belongs to another process, or a call inside a transformation.
    """
    mesh_of(sharded)
    check_rank(rank, sharded.tree.world_size)
    found = {}
    for unit, layout in sharded.tree.units:
        parts = {rank_of(part.index, layout): part.data for part in sharded.shards[unit].addressable_shards}
        if rank not in parts:
            raise UsageError(f"unit {unit!r}: rank {rank} lies in another process; here are ranks {sorted(parts)}")
        found[unit] = np.asarray(parts[rank])
    return found


def pieces_of(sharded: ShardedParams, rank: int) -> dict[str, np.ndarray]:
    """What one rank holds of each parameter, as flat runs by canonical name; padding is in none of them (R06).

    Where a run lies inside its parameter says `sharded.tree.layouts[unit].pieces(rank)`. Errors as `shards_of`.
    """
    found = {}
    for unit, buffer in shards_of(sharded, rank).items():
        for piece in sharded.tree.layouts[unit].pieces(rank):
            found[piece.name] = buffer[piece.shard_start : piece.shard_stop]
    return found
