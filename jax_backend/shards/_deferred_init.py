"""Parameters that are sharded as they are initialised, unit by unit, so that no device ever holds the whole model (R38)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from crossframe.errors import UsageError
from jax_backend.mesh._device_mesh import check_mesh, mesh_spec, model_axis_sizes
from jax_backend.shards._bucket import Bucket
from jax_backend.shards._build_tree import build_tree
from jax_backend.shards._options import Options
from jax_backend.shards._param_tree import ParamTree
from jax_backend.shards._sharded_params import ShardedParams
from jax_backend.tree import leaves_by_path


def init(fn: Callable[[], PyTree[jax.Array]], mesh: Mesh, **options: Any) -> ShardedParams:
    """The shards of the parameters that a function makes: `shard(jax.jit(fn)(), mesh, ...)` bit for bit, one bucket at a time.

    For each bucket a program is compiled that runs `fn` and keeps that bucket's parameters; XLA removes the rest. Draws from a
    key are the same in every program.

    Args:
        fn: () to the pytree of parameters; it holds its key, and can be traced. A module of flax's nnx is made inside it:
            `lambda: params_of(Model(rngs=nnx.Rngs(0)))`.
        mesh: from `make_mesh`.
        options: those of `shard`.

    Returns:
        The shards. A device holds at most its own shards and one full bucket. Outside jit, operations are compiled one by one, so
        that `fn()` may differ from `jax.jit(fn)()`, and from this result, in the last bits.

    Raises:
        UsageError: `fn` is not a function, an unknown option, or as `shard`.
        MappingError, UnitError, LayoutError: as `shard`.
    """
    check_mesh(mesh)
    if not callable(fn):
        raise UsageError(
            f"fn: expected a function that makes the parameters, got {type(fn).__name__}; use shard for arrays"
        )
    if unknown := sorted(set(options) - set(Options.__dataclass_fields__)):
        raise UsageError(
            f"init: {unknown} are not options of shard: expected among {list(Options.__dataclass_fields__)}"
        )
    tree = build_tree(jax.eval_shape(fn), mesh_spec(mesh).shard, Options(**options), model_axis_sizes(mesh))
    made = {}
    for bucket in tree.buckets:
        leaves = program_of(fn, tree, bucket, mesh)()
        # Wait, so that no device holds two full buckets.
        made[bucket.name] = jax.block_until_ready(_lay_out(leaves, tree, bucket, mesh))
        del leaves
    return ShardedParams.of(tree, made)


def program_of(fn: Callable[[], Any], tree: ParamTree, bucket: Bucket, mesh: Mesh) -> Any:
    """The jitted function, without arguments, that makes the full leaves of one bucket, by path, on each device.

    Another program makes shards of them: in one program the same formula may be compiled to other last bits.
    """

    def make() -> dict[str, jax.Array]:
        made = leaves_by_path(fn())
        entries = [tree.param_map.by_name[spec.name] for spec in bucket.layout.params]
        return {path: jnp.asarray(made[path]) for entry in entries for path in entry.paths}

    return jax.jit(make, out_shardings=NamedSharding(mesh, P()))


def _lay_out(leaves: dict[str, jax.Array], tree: ParamTree, bucket: Bucket, mesh: Mesh) -> Any:
    def lay_out(leaves: dict[str, jax.Array]) -> Any:
        entries = [tree.param_map.by_name[spec.name] for spec in bucket.layout.params]
        canonical = (bucket.layers.each(each.to_canonical)(*(leaves[path] for path in each.paths)) for each in entries)
        return bucket.from_params(dict(zip(bucket.indices, canonical, strict=True)))

    return jax.jit(lay_out, out_shardings=bucket.shardings(mesh))(leaves)
