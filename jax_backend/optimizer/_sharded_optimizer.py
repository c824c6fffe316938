"""optax on sharded parameters: on buckets in lines, or on parameters in their true shapes.

[Note: what an optimizer sees] Under the flat and the ragged layout a leaf of ShardedParams is a whole bucket in one line. A
transformation that treats each element by itself (Adam), or all elements of the model alike (clipping by the global norm), gives
the same there as on parameters. One that depends on leaves (LAMB, Adafactor, Muon, a mask by ndim or name) does not, and is
rejected (`_known_transformations.py`). Under the per-parameter layout leaves are parameters, but padded: optax is given them
without the padding, in the user's own shapes and axis order.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from crossframe.errors import UsageError
from jax_backend.mesh._device_mesh import SHARD_AXIS, check_mesh
from jax_backend.optimizer._known_transformations import check_elementwise
from jax_backend.shards._bucket import Bucket, grown, shrunk
from jax_backend.shards._param_tree import ParamTree
from jax_backend.shards._sharded_params import ShardedParams, mesh_of


class ShardedOptimizer(Protocol):
    """What `sharded_optimizer` returns, an `optax.GradientTransformationExtraArgs`, for type checkers."""

    def init(self, params: ShardedParams) -> Any:
        """The state of the optimizer."""
        ...

    def update(
        self, updates: ShardedParams, state: Any, params: ShardedParams | None = None, **extra_args: Any
    ) -> tuple[ShardedParams, Any]:
        """The updates for gradients, and the next state."""
        ...


def sharded_optimizer(
    tx: optax.GradientTransformation, mesh: Mesh | None = None, *, elementwise: bool = False
) -> ShardedOptimizer:
    """`tx` for ShardedParams: each rank has its shard of the results of `tx` on full parameters.

    `init(params)` and `update(grads, state, params)` take parameters with or without frozen ones; updates are of trained ones:
    `jax_backend.apply_updates(params, updates)`. Under "flat" and "ragged" the state is that of `tx` for ShardedParams. Under
    "per_param" it is that of `tx` for a dict of parameters by path of the user's leaf, its parts joined by ".", in the user's
    shapes and axis order, with shared ones once; masks and labels refer to that dict. A leaf of the state with the path and the
    shape of a parameter is sharded, its sharded dim padded with 0; other leaves are replicated. Padding of updates is always 0
    (R05). Call `update` inside jit.

    Args:
        tx: any transformation of optax. Under "flat" and "ragged", one that treats elements one by one or all alike.
        mesh: the mesh of the state; None: that of the parameters, if `init` is called outside jit, else XLA chooses the devices.
        elementwise: for "flat" and "ragged": state that `tx` treats elements one by one or all alike, if it is not of optax.

    Raises:
        UnsupportedError: by init or update, under "flat" and "ragged": a transformation that depends on leaves, or one that is
            not known and not stated to be elementwise.
        UsageError: not a transformation; or a state of other parameters.
    """
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise UsageError(f"expected a transformation of optax, got {type(tx).__name__}; for instance optax.adamw(1e-3)")
    if mesh is not None:
        check_mesh(mesh)
    # Without devices: a jitted update may be of parameters on others than those of the last init.
    meshes: dict[ParamTree, AbstractMesh] = {}
    views: dict[ParamTree, _OnLines | _OnParams] = {}

    def view_of(tree: ParamTree) -> _OnLines | _OnParams:
        if tree not in views:
            if not (tree.is_per_param or elementwise):
                check_elementwise(tx, tree.trainable[0].layout.kind)
            views[tree] = (_OnParams if tree.is_per_param else _OnLines)(tx, tree)
        return views[tree]

    def mesh_for(params: ShardedParams) -> Mesh | AbstractMesh | None:
        if mesh is not None:
            return mesh
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(params)):
            return meshes.get(params.tree)
        own = mesh_of(params)
        meshes[params.tree] = own.abstract_mesh
        return own

    # One program, from which XLA drops the gathers of parameters that only give their shapes. Operation by operation, each would
    # be gathered, by programs that wait for nothing: over gloo, two processes may run them in different orders and hang.
    @partial(jax.jit, static_argnames="own")
    def state_of(params: ShardedParams, own: Mesh | AbstractMesh | None) -> Any:
        return _placed(view_of(params.tree).init(params), params.tree, own)

    def init(params: Any) -> Any:
        params = _trainable(params, "params")
        return state_of(params, own=mesh_for(params))

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        grads = _trainable(grads, "grads")
        params, tree = (None if params is None else _trainable(params, "params")), grads.tree
        own = mesh_for(grads)
        updates, state = view_of(tree).update(grads, state, params, extra)
        return _placed(updates, tree, own), _placed(state, tree, own)

    # optax's types know trees of arrays, and not ShardedParams, which are registered as one.
    return cast(ShardedOptimizer, optax.GradientTransformationExtraArgs(init, update))  # type: ignore[arg-type]


class _OnLines:
    """A transformation that is given buckets, some of them lines; see [Note: what an optimizer sees]."""

    def __init__(self, tx: optax.GradientTransformation, tree: ParamTree) -> None:
        self._tx, self._tree = optax.with_extra_args_support(tx), tree

    def init(self, params: ShardedParams) -> Any:
        return self._tx.init(params)  # type: ignore[arg-type]

    def update(
        self, grads: ShardedParams, state: Any, params: ShardedParams | None, extra: Mapping[str, Any]
    ) -> tuple[ShardedParams, Any]:
        updates, state = self._tx.update(grads, state, params, **extra)  # type: ignore[arg-type]
        zeroed = {name: self._tree.by_name[name].zero_padding(each) for name, each in updates.shards.items()}  # type: ignore[attr-defined]
        return ShardedParams(zeroed, self._tree), state


class _OnParams:
    """A transformation that is given a dict of parameters in their true shapes, by path; see [Note: what an optimizer sees]."""

    def __init__(self, tx: optax.GradientTransformation, tree: ParamTree) -> None:
        self._tx, self._tree = optax.with_extra_args_support(tx), tree

    def init(self, params: ShardedParams) -> Any:
        return _padded(self._tx.init(_named(params)), self._tree)  # type: ignore[arg-type]

    def update(
        self, grads: ShardedParams, state: Any, params: ShardedParams | None, extra: Mapping[str, Any]
    ) -> tuple[ShardedParams, Any]:
        named = _named(grads)
        extra = {key: _named(value) if isinstance(value, ShardedParams) else value for key, value in extra.items()}
        given = _stripped(state, jax.eval_shape(self._tx.init, named), self._tree)
        updates, state = self._tx.update(named, given, None if params is None else _named(params), **extra)  # type: ignore[arg-type]
        return to_shards(updates, self._tree), _padded(state, self._tree)  # type: ignore[arg-type]


def apply_updates(params: ShardedParams, updates: ShardedParams) -> ShardedParams:
    """The parameters after updates of the trained ones, each in its own dtype; frozen ones do not change."""
    return params.with_trainable(optax.apply_updates(params.trainable, updates))  # type: ignore[arg-type,return-value]


def _trainable(given: Any, what: str) -> ShardedParams:
    if not isinstance(given, ShardedParams):
        raise UsageError(
            f"{what}: expected ShardedParams, got {type(given).__name__}; shard makes them, and value_and_grad their gradients; "
            "LocalGrads are reduced by a step first"
        )
    return given.trainable


# Parameters in true shapes, by path


def _named(params: ShardedParams) -> dict[str, jax.Array]:
    tree, found = params.tree, {}
    for path, (bucket, i) in tree.trained_leaves.items():
        spec = bucket.layout.params[i]
        array = shrunk(params.shards[bucket.name][spec.name], (*bucket.lead, *spec.shape))
        found[path] = bucket.layers.each(partial(tree.param_map.by_name[spec.name].from_canonical, path=path))(array)
    return found


def to_shards(named: Mapping[str, Any], tree: ParamTree) -> ShardedParams:
    """Shards of the trained parameters, from their values in the user's shapes by path."""
    shards: dict[str, Any] = {}
    for bucket in tree.trainable:
        entries = {name: tree.param_map.by_name[name] for name in bucket.indices}
        shards[bucket.name] = bucket.from_params(
            {
                name: bucket.layers.each(entry.to_canonical)(*(named[path] for path in entry.paths))
                for name, entry in entries.items()
            }
        )
    return ShardedParams(shards, tree)


# State


def _key(path: tuple[Any, ...]) -> str:
    """The last key of a path, if it is a dict's; else ""."""
    key = getattr(path[-1], "key", None) if path else None
    return key if isinstance(key, str) else ""


def mirrored_leaf(path: tuple[Any, ...], leaf: Any, tree: ParamTree) -> tuple[tuple[int, ...], int] | None:
    """(padded shape, sharded dim) of a leaf of the state that has the path and the true shape of a parameter; else None."""
    key = _key(path)
    found = tree.trained_leaves.get(key)
    if found is None:
        return None
    bucket, i = found
    layout = bucket.layout
    entry = tree.param_map.by_name[layout.params[i].name]
    shape = entry.leaf_shape(layout.params[i].shape, key)
    if tuple(leaf.shape) != (*bucket.lead, *shape):
        return None
    if not shape:
        return (*leaf.shape, layout.world_size), len(bucket.lead)
    if entry.axes is not None:
        cut = layout.shard_dims[i]
        dim = entry.axes[cut] if entry.axes else cut
    else:
        dim = max(range(len(shape)), key=lambda d: shape[d])
    dim += len(bucket.lead)
    rows = -(-leaf.shape[dim] // layout.world_size) * layout.world_size
    return (*leaf.shape[:dim], rows, *leaf.shape[dim + 1 :]), dim


def _padded(state: Any, tree: ParamTree) -> Any:
    def padded(path: tuple[Any, ...], leaf: Any) -> Any:
        leaf = jnp.asarray(leaf)
        found = mirrored_leaf(path, leaf, tree)
        return leaf if found is None else grown(leaf, found[0])

    return jax.tree_util.tree_map_with_path(padded, state)


def _stripped(state: Any, expected: Any, tree: ParamTree) -> Any:
    _check_state(state, expected, tree)
    return jax.tree.map(lambda leaf, true: shrunk(leaf, true.shape), state, expected)


def _check_state(state: Any, expected: Any, tree: ParamTree) -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    for path, true in jax.tree_util.tree_flatten_with_path(expected)[0]:
        found = mirrored_leaf(path, true, tree)
        shapes[jax.tree_util.keystr(path)] = true.shape if found is None else found[0]
    got = {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]}
    if wrong := sorted(key for key in shapes.keys() | got.keys() if shapes.get(key) != got.get(key)):
        raise UsageError(
            f"state: expected that of this transformation and these parameters, got other leaves or shapes at {wrong[:10]}; "
            "make it with init of the same sharded_optimizer"
        )


def _placed(made: Any, tree: ParamTree, mesh: Mesh | AbstractMesh | None) -> Any:
    """Updates or state with the shardings of the parameters; other leaves are replicated."""
    if mesh is None:
        return made

    def placed(path: tuple[Any, ...], leaf: Any) -> Any:
        if isinstance(leaf, ShardedParams):
            return _placed_shards(leaf, mesh)
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, _stored_partition(path, leaf, tree)))

    return jax.tree_util.tree_map_with_path(placed, made, is_leaf=lambda node: isinstance(node, ShardedParams))


def true_shape(path: tuple[Any, ...], leaf: Any, tree: ParamTree) -> tuple[int, ...] | None:
    """The shape without padding of a leaf of the stored state, if it has the form of a parameter; else None."""
    found = _stored(path, leaf, tree)
    return None if found is None else found[0]


def _stored_partition(path: tuple[Any, ...], leaf: Any, tree: ParamTree) -> P:
    found = _stored(path, leaf, tree)
    if found is None:
        return P()
    bucket, i = tree.trained_leaves[_key(path)]
    entry, given = tree.param_map.by_name[bucket.layout.params[i].name], tuple(bucket.model_partition(i))
    axes: dict[int, Any] = {found[1]: SHARD_AXIS}
    for dim, over in enumerate(given):
        if over:
            axes[len(bucket.lead) + (entry.axes[dim] if entry.axes else dim)] = over
    return P(*(axes.get(dim) for dim in range(max(axes) + 1)))


def _stored(path: tuple[Any, ...], leaf: Any, tree: ParamTree) -> tuple[tuple[int, ...], int] | None:
    """(shape without padding, sharded dim) of a leaf that is stored in the form of a parameter; else None."""
    key = _key(path)
    found = tree.trained_leaves.get(key)
    if found is None:
        return None
    bucket, i = found
    spec = bucket.layout.params[i]
    entry = tree.param_map.by_name[spec.name]
    true = jax.ShapeDtypeStruct((*bucket.lead, *entry.leaf_shape(spec.shape, key)), leaf.dtype)
    padded = mirrored_leaf(path, true, tree)
    return (true.shape, padded[1]) if padded is not None and padded[0] == leaf.shape else None


def _placed_shards(shards: ShardedParams, mesh: Mesh | AbstractMesh) -> ShardedParams:
    def placed(bucket: Bucket, arrays: Any) -> Any:
        if bucket.fits(arrays):
            return bucket.constrained(arrays, mesh)
        # A mask, or numbers that are no parameters.
        return jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P())), arrays)

    named = {name: placed(shards.tree.by_name[name], arrays) for name, arrays in shards.shards.items()}
    return ShardedParams(named, shards.tree)
