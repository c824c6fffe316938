"""ShardedParams: the shards of all units as one pytree, with the layouts as static data."""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from crossframe.dtypes import numpy_dtype
from crossframe.errors import UsageError
from crossframe.layout import Layout
from crossframe.mesh import check_rank
from crossframe.names import ParamMap
from crossframe.params import ParamSpec
from crossframe.precision import PrecisionPolicy
from crossframe.writeback import writeback_copies
from jax_backend.mesh._device_mesh import check_mesh, mesh_spec
from jax_backend.shards._bucket import Bucket
from jax_backend.shards._build import Options, build_tree
from jax_backend.shards._param_tree import ParamTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ShardedParams:
    """Parameters, or their gradients, or an optimizer's moments of them, as shards.

    A pytree: jax.tree and those of optax's transformations that look at single elements or at the global norm work on it as on
    any other. Flat and ragged, a leaf is a whole bucket in one line: what goes by a leaf's shape or name (a mask on ndim, LAMB's
    trust ratios) sees other leaves than the parameters; see `sharded_optimizer`. Nothing is validated here, since
    transformations put masks, shapes and None where the arrays are.

    Attributes:
        shards: by bucket what is trained. Flat and ragged, one array of shape (gathered_numel,), sharded over the mesh axis
            "shard": the part of device i, of shape (padded_shard_numel,), is bit for bit the shard of rank i, in canonical
            (torch's) order of parameters and of axes. Per parameter, a dict by canonical name of arrays in canonical shapes, the
            dim that is cut padded to equal chunks (R07). Stacked units have a leading dim of layers. Padding holds 0 (R05).
        tree: where every parameter lies. Static.
        frozen: the same of what is not trained; {} of gradients, and of `trainable`.
    """

    shards: dict[str, Any]
    tree: ParamTree = field(metadata={"static": True})
    frozen: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, tree: ParamTree, arrays: Mapping[str, Any]) -> "ShardedParams":
        """Sharded parameters with these arrays of each bucket, trained or frozen."""
        shards, frozen = (
            {
                bucket.name: arrays[bucket.name]
                for bucket in tree.buckets
                if bucket.trainable is trained and bucket.name in arrays
            }
            for trained in (True, False)
        )
        return cls(shards, tree, frozen)

    @property
    def trainable(self) -> "ShardedParams":
        """What gradients are of: the same without what is frozen. What an optimizer is given."""
        return replace(self, frozen={})

    def with_trainable(self, trainable: "ShardedParams") -> "ShardedParams":
        """What is frozen here beside what was trained."""
        return replace(trainable, frozen=self.frozen)

    @property
    def buckets(self) -> dict[str, Any]:
        """By bucket all arrays that are here, trained or frozen."""
        return {**self.shards, **self.frozen}


def shard(
    params: Any,
    mesh: Mesh,
    *,
    units: Iterable[str] = (),
    layout: str = "flat",
    mp_policy: PrecisionPolicy | None = None,
    reshard_after_forward: bool | None = None,
    param_map: ParamMap | None = None,
    frozen: Collection[str] | Callable[[str], bool] = (),
    shared: Mapping[str, str] | None = None,
    stacked: Iterable[str] = (),
    dims: Callable[[ParamSpec], int] | None = None,
    blocks: Callable[[ParamSpec], int] | None = None,
    keep_original: bool = True,
    unit_layouts: Mapping[str, Layout] | None = None,
) -> ShardedParams:
    """Shard full parameters.

    Args:
        params: a pytree of floating arrays (numpy or JAX); nested dicts, lists, nnx.State and modules of equinox are fine.
        mesh: from `make_mesh`.
        units: canonical names of the modules that are units; the root "" is one whether named or not. A parameter
            belongs to the nearest enclosing unit, and stands inside it in the order of the map.
        layout: "flat" as torch's FSDP1 (R04), "per_param" as its FSDP2 (R07), or "ragged" (R09).
        mp_policy: in which dtypes parameters are gathered and gradients reduced; None: as they are stored.
        reshard_after_forward: whether backward gathers again; None asks the strategy, and leaves the root full (R13).
        param_map: canonical names, order and axis orders. Default: the pytree's own paths, order and axes.
        frozen: canonical names of parameters, or of modules, that get no gradient; or a predicate on names.
        shared: by path of a leaf that of the leaf whose parameter it is (R31). JAX knows no identity of arrays.
        stacked: canonical names of units whose leaves all have a leading dim of layers, each of which is gathered by itself
            inside `jax_backend.scan`.
        dims: which dim of a parameter is cut, under "per_param"; None: dim 0. Others than 0 must be divisible.
        blocks: how many elements of a parameter stay together, under "ragged"; None: a row.
        keep_original: whether the flat layout aligns parameters and pads its tail (R02, R03).
        unit_layouts: layouts by bucket to use instead of those computed here, for instance torch's own; their parameters
            may stand in any order.

    Returns:
        The shards; no device ever holds more than its own.

    Raises:
        UsageError: a leaf that is no floating array, a mesh that `make_mesh` did not make, or a choice that is none.
        MappingError: a map that does not fit the pytree.
        UnitError: a unit that is no module, or a stacked one whose leaves have not one number of layers.
        LayoutError: mixed dtypes in one flat unit, a parameter without dims, or a layout of other parameters or of another
            world size.
    """
    check_mesh(mesh)
    options = Options(
        units, param_map, layout, mp_policy, reshard_after_forward, frozen, shared, stacked, dims, blocks, keep_original,
        unit_layouts,
    )  # fmt: skip
    tree = build_tree(params, mesh_spec(mesh).shard, options)
    leaves = tree.leaves(params)
    return from_lines(tree, mesh, lambda path, rank: np.asarray(leaves[path]))


def from_lines(tree: ParamTree, mesh: Mesh, read: Callable[[str, int], np.ndarray]) -> ShardedParams:
    """Build the shards of every rank that this process holds.

    Args:
        read: (path of a leaf, place in the shard group) to that rank's value of the leaf.
    """
    spec = mesh_spec(mesh)

    def arrays(bucket: Bucket) -> Any:
        part = functools.cache(lambda place: bucket.from_line(line_of(tree, bucket, place, read)))
        return bucket.assembled(mesh, lambda rank: part(spec.coordinate(rank)[1]))

    return ShardedParams.of(tree, {bucket.name: arrays(bucket) for bucket in tree.buckets})


def line_of(tree: ParamTree, bucket: Bucket, place: int, read: Callable[[str, int], np.ndarray]) -> np.ndarray:
    """The line of a bucket at a place of the shard group, from full leaves; arguments as of `from_lines`."""
    layout = bucket.layout
    line = np.zeros(bucket.line_shape, numpy_dtype(layout.dtype))
    for copy in writeback_copies(layout, place):
        entry = tree.param_map.by_name[layout.params[copy.index].name]
        layers = zip(*(bucket.layers.split(read(path, place)) for path in entry.paths), strict=True)
        for parts, row in zip(layers, bucket.layers.split(line), strict=True):
            flat = entry.to_canonical(*parts).reshape(-1)
            row[copy.shard_start : copy.shard_stop] = flat[copy.param_start : copy.param_stop]
    return line


def mesh_of(sharded: ShardedParams) -> Mesh:
    """The mesh that the shards lie on; UsageError inside a transformation, where arrays lie nowhere yet."""
    if not isinstance(sharded, ShardedParams):
        raise UsageError(f"expected ShardedParams, got {type(sharded).__name__}; make them with jax_backend.shard")
    array = next(iter(jax.tree.leaves(sharded)), None)
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        raise UsageError(
            f"expected shards that lie on the devices of a mesh, got {type(array).__name__}; "
            "call this outside jit and grad, on what shard or value_and_grad returned"
        )
    return sharding.mesh


def shards_of(sharded: ShardedParams, rank: int) -> dict[str, np.ndarray]:
    """One rank's shard of every bucket, of shape (padded_shard_numel,), padding included; of a stacked unit that of every layer,
    (num_layers, padded_shard_numel).

    Raises:
        MeshError: a rank that does not exist.
        UsageError: a rank whose device belongs to another process, or a call inside a transformation.
    """
    mesh = mesh_of(sharded)
    check_rank(rank, mesh.size)
    device = mesh.devices.flat[rank]

    def here(array: jax.Array) -> np.ndarray:
        for part in array.addressable_shards:
            if part.device == device:
                return np.asarray(part.data)
        known = sorted(r for r, each in enumerate(mesh.devices.flat) if each in array.sharding.addressable_devices)
        raise UsageError(f"rank {rank} lies in another process; here are ranks {known}")

    found = {}
    for name, arrays in sharded.buckets.items():
        bucket = sharded.tree.by_name[name]
        found[name] = np.asarray(bucket.to_line(jax.tree.map(here, arrays)))
    return found


def pieces_of(sharded: ShardedParams, rank: int) -> dict[str, np.ndarray]:
    """What one rank holds of each parameter, as flat runs by canonical name; padding is in none of them (R06).

    Where a run lies inside its parameter says `sharded.tree.layouts[bucket].pieces(place)`, with the rank's place in its shard
    group; of a stacked unit there is one of every layer, (num_layers, numel). Errors as `shards_of`.
    """
    place = mesh_spec(mesh_of(sharded)).coordinate(rank)[1]
    found = {}
    for name, buffer in shards_of(sharded, rank).items():
        for piece in sharded.tree.layouts[name].pieces(place):
            found[piece.name] = buffer[..., piece.shard_start : piece.shard_stop]
    return found
