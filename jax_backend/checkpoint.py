"""Checkpoints in crossframe's format: saved by one mesh, layout and backend, loaded by any other."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from crossframe.checkpoint import MODEL, STATE, CheckpointError, begin, finish, read, write_rank
from crossframe.errors import UnsupportedError
from crossframe.layout import FlatLayout, Layout, PerParamLayout, Sharding
from crossframe.mesh import MeshSpec
from jax_backend.mesh import mesh_spec
from jax_backend.optim import named_leaves, true_shape
from jax_backend.sharded import ShardedParams, mesh_of
from jax_backend.tree import Bucket

# By place in the shard group, one rank's line of each layout.
Lines = Mapping[int, list[np.ndarray]]


@dataclass(frozen=True)
class _Part:
    """Arrays that are laid out together.

    Attributes:
        units: (unit, layout) of each line; of a stacked bucket one a layer.
        line: (place) to the rank's lines.
        joined: the inverse: an array, or arrays by parameter.
    """

    units: tuple[tuple[str, Layout], ...]
    lines: Callable[[int], list[np.ndarray]]
    joined: Callable[[Lines], Any]


def save(path: Path | str, sharded: ShardedParams, optimizer_state: Any = None) -> None:
    """Write parameters, and what an optimizer keeps of them, to a new folder; padding is not in it.

    Args:
        optimizer_state: of `sharded_optimizer`, or of optax on ShardedParams.

    Raises:
        CheckpointError: there is something at `path`.
        UnsupportedError: in one of several processes.
    """
    _check_single()
    path, mesh = Path(path), mesh_of(sharded)
    parts = _model_parts(sharded, mesh)
    sections = {MODEL: _sharding(parts.values(), mesh)}
    state_parts, values = _state_parts(optimizer_state, sharded, mesh)
    if optimizer_state is not None:
        sections[STATE] = _sharding(state_parts.values(), mesh)
    begin(path)
    for place in range(mesh_spec(mesh).shard):
        lines = {MODEL: [line for part in parts.values() for line in part.lines(place)]}
        lines[STATE] = [line for part in state_parts.values() for line in part.lines(place)]
        write_rank(path, place, sections, lines, values if place == 0 else None)
    finish(path, sections, values)


def load(path: Path | str, like: ShardedParams, optimizer_state: Any = None) -> Any:
    """Read parameters into the mesh and the layouts of others.

    Args:
        like: parameters of the model; its values do not matter, and stay as they are.
        optimizer_state: None, or as `init` of the optimizer gives it for `like`, to be read too.

    Returns:
        The parameters; with a state (parameters, state).

    Raises:
        CheckpointError: it is missing or damaged, or holds other names, shapes or dtypes, which are listed; no state was saved,
            or one of another optimizer.
        UnsupportedError: in one of several processes.
    """
    _check_single()
    saved, mesh = read(Path(path)), mesh_of(like)
    parts = _model_parts(like, mesh)
    made = _read(saved, MODEL, parts, mesh)
    params = ShardedParams({name: made[name] for name in like.shards}, like.tree, {n: made[n] for n in like.frozen})
    if optimizer_state is None:
        return params
    state_parts, values = _state_parts(optimizer_state, like, mesh)
    if set(values) != set(saved.values):
        raise CheckpointError(
            f"{path}: expected the state of an optimizer with the values {sorted(values)}, got {sorted(saved.values)}; nothing "
            "was loaded"
        )
    made = _read(saved, STATE, state_parts, mesh)
    leaves, structure = jax.tree_util.tree_flatten_with_path(optimizer_state)
    read_leaves = []
    for leaf_path, leaf in leaves:
        key = jax.tree_util.keystr(leaf_path)
        if key in values:
            value = saved.value(key)
            if value.shape != values[key].shape or value.dtype != values[key].dtype:
                raise CheckpointError(
                    f"{path}: value {key!r}: expected {values[key].dtype} {values[key].shape}, got {value.dtype} {value.shape}"
                )
            made[key] = jax.device_put(_widened(value, leaf.shape), leaf.sharding)
        read_leaves.append(made[key])
    return params, jax.tree.unflatten(structure, read_leaves)


def _check_single() -> None:
    if jax.process_count() > 1:
        raise UnsupportedError(
            f"checkpoints of JAX in {jax.process_count()} processes: expected one; use orbax.checkpoint, for which ShardedParams "
            "are a pytree like any other"
        )


def _sharding(parts: Any, mesh: Mesh) -> Sharding:
    return Sharding(tuple(unit for part in parts for unit in part.units), MeshSpec(mesh_spec(mesh).shard))


def _read(saved: Any, section: str, parts: Mapping[str, _Part], mesh: Mesh) -> dict[str, Any]:
    target = _sharding(parts.values(), mesh)
    by_place = {place: saved.lines(section, target, place) for place in range(target.mesh.shard)}
    found, at = {}, 0
    for key, part in parts.items():
        stop = at + len(part.units)
        found[key] = part.joined({place: lines[at:stop] for place, lines in by_place.items()})
        at = stop
    return found


# What lies where


def _model_parts(sharded: ShardedParams, mesh: Mesh) -> dict[str, _Part]:
    return {
        bucket.name: _bucket_part(bucket, sharded.buckets[bucket.name], mesh, "")
        for bucket in sharded.tree.buckets
        if bucket.name in sharded.buckets
    }


def _bucket_part(bucket: Bucket, arrays: Any, mesh: Mesh, prefix: str) -> _Part:
    dtype = str(jax.tree.leaves(arrays)[0].dtype)
    layers = range(bucket.num_layers or 1)
    layouts = [_renamed(bucket, prefix, dtype, None if bucket.num_layers is None else layer) for layer in layers]

    def lines(place: int) -> list[np.ndarray]:
        device = mesh.devices.flat[place]  # of the first replica
        own = jax.tree.map(lambda a: next(p.data for p in a.addressable_shards if p.device == device), arrays)
        line = np.asarray(bucket.to_line(own))
        return [line] if bucket.num_layers is None else list(line)

    def joined(by_place: Lines) -> Any:
        spec, whole = mesh_spec(mesh), bucket.num_layers is None
        per_rank = []
        for rank in range(mesh.size):
            own = by_place[spec.coordinate(rank)[1]]
            per_rank.append(bucket.from_line(own[0] if whole else np.stack(own)))

        def array(shape: tuple[int, ...], partition: Any, parts: list[np.ndarray]) -> jax.Array:
            placed = [jax.device_put(part, device) for part, device in zip(parts, mesh.devices.flat, strict=True)]
            return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, partition), placed)

        shapes, partitions = bucket.shapes(), bucket.partitions()
        if not bucket.is_per_param:
            return array(shapes, partitions, per_rank)
        return {key: array(shapes[key], partitions[key], [each[key] for each in per_rank]) for key in shapes}

    return _Part(tuple((bucket.unit, layout) for layout in layouts), lines, joined)


def _renamed(bucket: Bucket, prefix: str, dtype: str, layer: int | None) -> Layout:
    """The bucket's layout with the names under which it is saved: a stacked unit's layers as torch's list of blocks has them."""

    def name(own: str) -> str:
        return own if layer is None else f"{bucket.unit}.{layer}{own.removeprefix(bucket.unit)}"

    layout: Any = bucket.layout
    params = tuple(
        replace(
            spec,
            name=prefix + name(spec.name),
            aliases=tuple(prefix + name(alias) for alias in spec.aliases),
            dtype=dtype,
        )
        for spec in layout.params
    )
    if isinstance(layout, FlatLayout):  # whose alignment goes by the dtype of the parameters, not by that of moments
        return replace(layout, params=params, compute_dtype=layout.compute_dtype or layout.dtype)
    return replace(layout, params=params)


def _state_parts(state: Any, params: ShardedParams, mesh: Mesh) -> tuple[dict[str, _Part], dict[str, np.ndarray]]:
    """Of an optimizer's state: by path of the leaf what is laid out as parameters are, and all other values, without padding."""
    parts: dict[str, _Part] = {}
    values: dict[str, np.ndarray] = {}
    for node_path, node in jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda n: isinstance(n, ShardedParams))[
        0
    ]:
        key = jax.tree_util.keystr(node_path)
        if isinstance(node, ShardedParams):
            for path, leaf in jax.tree_util.tree_flatten_with_path(node)[0]:
                bucket, own = node.tree.by_name[path[1].key], key + jax.tree_util.keystr(path)
                if leaf.shape == bucket.shapes():
                    parts[own] = _bucket_part(bucket, leaf, mesh, f"{key}:")
                else:
                    values[own] = np.asarray(leaf)
            continue
        true = true_shape(node_path, node, params.tree)
        of_one = None if true is None else _leaf_part(node_path, node, params, mesh)
        if of_one is not None:
            parts[key] = of_one
        else:
            values[key] = np.asarray(node)[tuple(slice(size) for size in true or node.shape)]
    return parts, values


def _leaf_part(path: tuple[Any, ...], leaf: jax.Array, params: ShardedParams, mesh: Mesh) -> _Part | None:
    """Of a leaf of the state that is stored as a parameter is, in the user's axis order: the same in canonical order. None where
    several leaves or a split dim make the parameter."""
    bucket, name = named_leaves(params.tree)[path[-1].key]
    entry, layout = params.tree.param_map.by_name[name], bucket.layout
    if len(entry.paths) > 1 or entry.split is not None:
        return None
    assert isinstance(layout, PerParamLayout)
    i = next(i for i, spec in enumerate(layout.params) if spec.name == name)
    alone = PerParamLayout((layout.params[i],), layout.world_size, (layout.shard_dims[i],))
    one = replace(bucket, layout=alone)
    dtype, prefix = str(leaf.dtype), f"{jax.tree_util.keystr(path[:-1])}:"
    layers = [None] if bucket.num_layers is None else list(range(bucket.num_layers))

    def axes(inverse: bool) -> tuple[int, ...]:
        order = (entry.inverse_axes if inverse else entry.axes) or tuple(range(len(layout.params[i].shape)))
        return order if bucket.num_layers is None else (0, *(axis + 1 for axis in order))

    def lines(place: int) -> list[np.ndarray]:
        device = mesh.devices.flat[place]
        own = next(np.asarray(part.data) for part in leaf.addressable_shards if part.device == device)
        own = own.transpose(axes(inverse=False))
        return [own.reshape(-1)] if bucket.num_layers is None else list(own.reshape(len(layers), -1))

    def joined(by_place: Lines) -> jax.Array:
        placed = []
        for rank, device in enumerate(mesh.devices.flat):
            own = by_place[mesh_spec(mesh).coordinate(rank)[1]]
            part = one.from_line(own[0] if bucket.num_layers is None else np.stack(own))[name]
            placed.append(jax.device_put(part.transpose(axes(inverse=True)), device))
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, placed)

    units = tuple((bucket.unit, _renamed(one, prefix, dtype, layer)) for layer in layers)
    return _Part(units, lines, joined)


def _widened(value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return (
        value
        if value.shape == shape
        else np.pad(value, [(0, wide - size) for size, wide in zip(value.shape, shape, strict=True)])
    )
