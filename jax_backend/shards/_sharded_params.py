"""ShardedParams: the shards of all units as one pytree, with the layouts as static data."""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from crossframe.dtypes import numpy_dtype
from crossframe.errors import UsageError
from crossframe.layout import Layout
from crossframe.mesh import check_rank
from crossframe.param_map import ParamMap
from crossframe.params import ParamSpec
from crossframe.precision import PrecisionPolicy
from crossframe.writeback import writeback_copies
from jax_backend.mesh._device_mesh import check_mesh, mesh_spec, model_axis_sizes, num_ranks
from jax_backend.mesh._rank_parts import part_of_rank
from jax_backend.shards._bucket import Bucket
from jax_backend.shards._build_tree import build_tree
from jax_backend.shards._options import Options
from jax_backend.shards._param_tree import ParamTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ShardedParams:
    """Parameters, their gradients, or an optimizer's moments of them, as shards.

    A pytree: jax.tree works on it, and so do transformations of optax that treat single elements or the global norm. Under the
    flat and ragged layouts a leaf is a whole bucket in one line, so transformations that depend on a leaf's shape or name (a mask
    on ndim, LAMB's trust ratios) do not; see `sharded_optimizer`. Nothing is validated here, since transformations put masks,
    shapes and None in place of the arrays.

    Attributes:
        shards: the trained buckets by name. Under flat and ragged, one array of shape (gathered_numel,), sharded over the mesh
            axis "shard": the part of device i, of shape (padded_shard_numel,), is bit for bit the shard of rank i, in canonical
            (torch's) order of parameters and axes. Under per_param, a dict by canonical name of arrays in canonical shapes, whose
            sharded dim is padded to equal chunks (R07). Stacked units have a leading dim of layers. Padding holds 0 (R05).
        tree: the position of every parameter. Static.
        frozen: the frozen buckets, likewise; {} for gradients and for `trainable`.
    """

    shards: dict[str, PyTree[jax.Array]]
    tree: ParamTree = field(metadata={"static": True})
    frozen: dict[str, PyTree[jax.Array]] = field(default_factory=dict)

    @classmethod
    def of(cls, tree: ParamTree, arrays: Mapping[str, PyTree[jax.Array]]) -> "ShardedParams":
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
        """The same without frozen parameters, as an optimizer takes it."""
        return replace(self, frozen={})

    def with_trainable(self, trainable: "ShardedParams") -> "ShardedParams":
        """These frozen parameters with other trained ones."""
        return replace(trainable, frozen=self.frozen)

    @property
    def buckets(self) -> dict[str, PyTree[jax.Array]]:
        """The arrays of all buckets, trained or frozen, by bucket."""
        return {**self.shards, **self.frozen}


def shard(
    params: PyTree[jax.Array],
    mesh: Mesh,
    *,
    units: Iterable[str] = (),
    layout: str = "per_param",
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
    model_partition: Callable[[ParamSpec], PartitionSpec | None] | None = None,
) -> ShardedParams:
    """Shard full parameters.

    Args:
        params: a pytree of floating arrays (numpy or JAX): nested dicts, lists, nnx.State, modules of equinox. Or of
            jax.ShapeDtypeStruct, to lower and compile a step ahead of time, without values.
        mesh: from `make_mesh`.
        units: canonical names of the modules that are units; the root "" always is. A parameter belongs to the nearest enclosing
            unit. Its parameters are in the order of the map.
        layout: "per_param": an array for each parameter, in its own shape, for every transformation of optax; torch's FSDP2 has
            the same shards (R07). "flat": an array for each unit, as in torch's FSDP1 (R04). "ragged": the same, whose shards
            begin and end between rows (R09).
        mp_policy: the dtypes in which parameters are gathered and gradients reduced; None: as they are stored.
        reshard_after_forward: whether backward gathers again; None: as the strategy says, but not for the root (R13).
        param_map: canonical names, order and axis orders. Default: the pytree's own paths, order and axes.
        frozen: canonical names of parameters or modules that get no gradient; or a predicate on names.
        shared: for the path of each leaf that shares a parameter, the path of its owner (R31). JAX has no identity of arrays.
        stacked: canonical names of units whose leaves all have a leading dim of layers, which are gathered one by one inside
            `jax_backend.scan`.
        dims: the dim on which a parameter is sharded, under "per_param"; None: dim 0. Other dims must be divisible.
        blocks: the number of elements of a parameter that stay together, under "ragged"; None: a row.
        keep_original: whether the flat layout aligns parameters and pads its tail (R02, R03).
        unit_layouts: layouts by bucket to use instead of the computed ones, such as torch's; their parameters may be in any
            order.
        model_partition: on a mesh with model axes, under "per_param": the PartitionSpec of a parameter over these axes, such as
            P(None, "tp"); None: every device of a rank has all of it. It divides other dims than `dims`; of a stacked unit, those
            of one layer.

    Returns:
        The shards; no device ever holds more than its own. Without values, ShardedParams of jax.ShapeDtypeStruct.

    Raises:
        UsageError: a leaf that is not a floating array, a mesh that `make_mesh` did not make, or an invalid option.
        MappingError: a map that does not fit the pytree.
        UnitError: a unit that is not a module, or a stacked unit whose leaves differ in the number of layers.
        LayoutError: mixed dtypes in one flat unit, a layout of other parameters or of another world size, a partition that
            does not fit a parameter, or flat and ragged shards on a mesh with model axes.
    """
    check_mesh(mesh)
    options = Options(
        units, param_map, layout, mp_policy, reshard_after_forward, frozen, shared, stacked, dims, blocks, keep_original,
        unit_layouts, model_partition,
    )  # fmt: skip
    tree = build_tree(params, mesh_spec(mesh).shard, options, model_axis_sizes(mesh))
    leaves = tree.leaves(params)
    if all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves.values()):
        return ShardedParams.of(tree, {bucket.name: bucket.structs(mesh) for bucket in tree.buckets})
    return from_lines(tree, mesh, lambda path, rank: np.asarray(leaves[path]))


def from_lines(tree: ParamTree, mesh: Mesh, read: Callable[[str, int], np.ndarray]) -> ShardedParams:
    """The shards of every rank of this process.

    Args:
        read: from (path of a leaf, index in the shard group) to that rank's value of the leaf.
    """
    spec = mesh_spec(mesh)

    def arrays(bucket: Bucket) -> PyTree[jax.Array]:
        part = functools.cache(lambda place: bucket.from_line(line_of(tree, bucket, place, read)))
        return bucket.assembled(mesh, lambda rank: part(spec.coordinate(rank)[1]))

    return ShardedParams.of(tree, {bucket.name: arrays(bucket) for bucket in tree.buckets})


def line_of(tree: ParamTree, bucket: Bucket, place: int, read: Callable[[str, int], np.ndarray]) -> np.ndarray:
    """The line of a bucket at an index of the shard group, from full leaves; see `from_lines`."""
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
    """The mesh of the shards; UsageError inside a transformation, where arrays have no devices."""
    if not isinstance(sharded, ShardedParams):
        raise UsageError(f"expected ShardedParams, got {type(sharded).__name__}; make them with jax_backend.shard")
    array = next(iter(jax.tree.leaves(sharded)), None)
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        raise UsageError(
            f"expected shards on the devices of a mesh, got {type(array).__name__}; "
            "call this outside jit and grad, on what shard or value_and_grad returned"
        )
    return sharding.mesh


def shards_of(sharded: ShardedParams, rank: int) -> dict[str, np.ndarray]:
    """One rank's shard of every bucket: shape (padded_shard_numel,), with padding, and a leading dim of layers if stacked.

    Raises:
        MeshError: a rank that does not exist.
        UsageError: a rank of another process, or a call inside a transformation.
    """
    mesh = mesh_of(sharded)
    check_rank(rank, num_ranks(mesh))

    def here(array: jax.Array) -> np.ndarray:
        return np.asarray(part_of_rank(array, mesh, rank))

    found = {}
    for name, arrays in sharded.buckets.items():
        bucket = sharded.tree.by_name[name]
        found[name] = np.asarray(bucket.to_line(jax.tree.map(here, arrays)))
    return found


def pieces_of(sharded: ShardedParams, rank: int) -> dict[str, np.ndarray]:
    """One rank's piece of each parameter, by canonical name, as a 1-D array without padding (R06).

    For offsets inside the parameter see `sharded.tree.layouts[bucket].pieces(index)`, with the rank's index in its shard group.
    In a stacked unit a piece has a leading dim of layers. Errors as `shards_of`.
    """
    place = mesh_spec(mesh_of(sharded)).coordinate(rank)[1]
    found = {}
    for name, buffer in shards_of(sharded, rank).items():
        for piece in sharded.tree.layouts[name].pieces(place):
            found[piece.name] = buffer[..., piece.shard_start : piece.shard_stop]
    return found
