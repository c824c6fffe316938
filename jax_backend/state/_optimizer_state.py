"""The state of an optimizer of optax in crossframe's checkpoints.

State with the form of parameters is saved by bucket or by parameter, with canonical names and axis order; other state as values.
The state of Adam and momentum has torch's names, so that either framework can resume from the other. Other state is saved under
its path in optax's state, and only JAX reads it.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from crossframe.checkpoint import STEP, CheckpointError, Saved
from crossframe.param_map import MapEntry
from jax_backend.optimizer._sharded_optimizer import true_shape
from jax_backend.shards._bucket import PerParamBucket, grown, shrunk
from jax_backend.shards._layers import Layers, OneLayer
from jax_backend.shards._sharded_params import ShardedParams
from jax_backend.state._checkpoint_parts import Part
from jax_backend.tree import is_key

# The fields of optax's states that torch's Adam and SGD have too, with the same meaning.
IN_TORCH: Mapping[type, Mapping[str, str]] = {
    optax.ScaleByAdamState: {"count": STEP, "mu": "exp_avg", "nu": "exp_avg_sq"},
    optax.TraceState: {"trace": "momentum_buffer"},
}
# Counters that equal the step, if the optimizer takes every step.
COUNTS = (optax.ScaleByScheduleState,)


@dataclass(frozen=True)
class _Joined:
    """A parameter of several of the user's arrays, or of one array in which a dim is split: a program makes it canonical.

    Attributes:
        entry: maps the arrays to the parameter.
        shape: the canonical shape, without padding and layers.
        padded: the shape with both, as the bucket stores it.
        cut, stored: the arrays' shapes without padding and with it.
    """

    entry: MapEntry
    shape: tuple[int, ...]
    padded: tuple[int, ...]
    cut: tuple[tuple[int, ...], ...]
    stored: tuple[tuple[int, ...], ...]
    layers: OneLayer | Layers


class StateLeaves:
    """The state of an optimizer.

    Args:
        state: any pytree; None has no leaves.
        params: the parameters.

    Attributes:
        parts: the state that has the form of parameters.
    """

    def __init__(self, state: Any, params: ShardedParams, mesh: Mesh) -> None:
        self.parts: list[Part] = []
        # Typed random keys are stored as their numbers.
        self._key_impls = {
            jax.tree_util.keystr(path): jax.random.key_impl(leaf)
            for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]
            if is_key(leaf)
        }
        state = jax.tree.map(lambda leaf: jax.random.key_data(leaf) if is_key(leaf) else leaf, state)
        self._mesh, self._names = mesh, _names_in_torch(state)
        self._leaves, self._structure = jax.tree_util.tree_flatten_with_path(state)
        # For each part the keys of its leaves, in order, and how they were joined.
        self._keys: list[tuple[list[str], _Joined | None]] = []
        self._values: dict[str, tuple[jax.Array, tuple[int, ...]]] = {}
        self._counts = _counts(state)
        named: dict[tuple[str, str], dict[str, tuple[str, jax.Array]]] = {}
        nodes = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda node: isinstance(node, ShardedParams))[0]
        for path, node in nodes:
            key = jax.tree_util.keystr(path)
            if isinstance(node, ShardedParams):
                self._add_shards(key, node)
            elif (shape := true_shape(path, node, params.tree)) is not None:
                owner = params.tree.param_map.by_path[path[-1].key].name
                before = jax.tree_util.keystr(path[:-1])
                named.setdefault((before, owner), {})[path[-1].key] = (key, node)
                self._values[key] = node, shape
            else:
                self._values[key] = node, node.shape
        for (before, owner), leaves in named.items():
            entry = params.tree.param_map.by_name[owner]
            if set(leaves) == set(entry.paths):
                bucket, _ = params.tree.trained_leaves[entry.paths[0]]
                self._add_param(before, entry, bucket, [leaves[path] for path in entry.paths])

    def _add_shards(self, key: str, node: ShardedParams) -> None:
        for field, buckets in (("shards", node.shards), ("frozen", node.frozen)):
            for name, arrays in buckets.items():
                bucket = node.tree.by_name[name]
                flat = jax.tree_util.tree_flatten_with_path(arrays)[0]
                keys = [f"{key}.{field}[{name!r}]{jax.tree_util.keystr(path)}" for path, _ in flat]
                if bucket.fits(arrays):
                    self._add(Part.of(bucket, arrays, self._mesh, self._names.get(key, key)), keys)
                else:
                    self._values |= {own: (leaf, leaf.shape) for own, (_, leaf) in zip(keys, flat, strict=True)}

    def _add_param(
        self, key: str, entry: MapEntry, bucket: PerParamBucket, leaves: list[tuple[str, jax.Array]]
    ) -> None:
        """Add the state of one parameter.

        Args:
            leaves: (key, array) of each of the user's leaves.
        """
        i = bucket.indices[entry.name]
        alone = bucket.alone(i)
        keys, arrays = [own for own, _ in leaves], [array for _, array in leaves]
        called, joined, axes = self._names.get(key, key), None, entry.axes or None
        if len(arrays) > 1 or entry.axes is None:
            joined = _Joined(
                entry,
                bucket.layout.params[i].shape,
                alone.shapes()[entry.name],
                tuple(self._values[own][1] for own in keys),
                tuple(array.shape for array in arrays),
                bucket.layers,
            )
            sharding = NamedSharding(self._mesh, alone.leaf_partition(0))
            arrays, axes = [_to_canonical(joined, sharding, *arrays)], None
        self._add(Part.of(alone, {entry.name: arrays[0]}, self._mesh, called, axes), keys, joined)

    def _add(self, part: Part, keys: list[str], joined: _Joined | None = None) -> None:
        self.parts.append(part)
        self._keys.append((keys, joined))
        for key in keys:
            self._values.pop(key, None)

    def values(self) -> dict[str, np.ndarray]:
        """State without the form of parameters, by its name in a checkpoint. All processes call it."""
        found = {self._names.get(key, key): self._whole(*each) for key, each in self._values.items()}
        for key in self._counts:
            if STEP in found and np.array_equal(found[key], found[STEP]):
                del found[key]
        return found

    def _whole(self, array: jax.Array, shape: tuple[int, ...]) -> np.ndarray:
        if not array.is_fully_addressable and not array.is_fully_replicated:
            array = jax.jit(lambda each: each, out_shardings=NamedSharding(self._mesh, P()))(array)
        # An array caches its values as numpy has them, which on CPU are its own memory: JAX 0.11 does not donate it any more.
        if array.is_fully_replicated:
            array = array.addressable_data(0)
        return shrunk(np.asarray(array), shape)

    def read_values(self, saved: Saved) -> dict[str, np.ndarray]:
        """The values of a checkpoint, by key of the leaf.

        Raises:
            CheckpointError: the checkpoint has other values.
        """
        wanted = {key: self._names.get(key, key) for key in self._values}
        for key in self._counts:
            if key not in saved.values and STEP in saved.values:
                wanted[key] = STEP
        if set(wanted.values()) != set(saved.values):
            raise CheckpointError(
                f"{saved.path}, from which nothing was loaded: expected the state of an optimizer with the values "
                f"{sorted(set(wanted.values()))}, got {sorted(saved.values)}; build the optimizer that was saved, or "
                "load without one"
            )
        found = {}
        for key, name in wanted.items():
            leaf, shape = self._values[key]
            value = saved.value(name)
            if value.shape != shape or value.dtype != leaf.dtype:
                raise CheckpointError(
                    f"{saved.path}, from which nothing was loaded: value {name!r}: expected {leaf.dtype} {shape}, got "
                    f"{value.dtype} {value.shape}"
                )
            padding = [(0, wide - size) for size, wide in zip(shape, leaf.shape, strict=True)]
            found[key] = np.pad(value, padding) if shape else value
        return found

    def joined(self, of_parts: list[Any], values: Mapping[str, np.ndarray]) -> Any:
        """The state from the arrays of each part and the values. All processes call it."""
        leaves = {jax.tree_util.keystr(path): leaf for path, leaf in self._leaves}
        found: dict[str, jax.Array] = {}
        for (keys, joined), arrays in zip(self._keys, of_parts, strict=True):
            made = jax.tree.leaves(arrays)
            if joined is not None:
                made = _from_canonical(joined, tuple(leaves[key].sharding for key in keys), made[0])
            found |= dict(zip(keys, made, strict=True))
        for key, value in values.items():
            like = leaves[key]
            # An array that is not committed, as optax makes counts, follows others; one that is loaded would be committed.
            sharding = like.sharding if like.committed else NamedSharding(self._mesh, P())
            found[key] = jax.make_array_from_callback(like.shape, sharding, lambda index, value=value: value[index])
            if key in self._key_impls:
                found[key] = jax.random.wrap_key_data(found[key], impl=self._key_impls[key])
        return jax.tree.unflatten(self._structure, [found[key] for key in leaves])


@partial(jax.jit, static_argnums=(0, 1))
def _to_canonical(joined: _Joined, sharding: NamedSharding, *arrays: jax.Array) -> jax.Array:
    whole = joined.layers.each(joined.entry.to_canonical)(*map(shrunk, arrays, joined.cut))
    return jax.lax.with_sharding_constraint(grown(whole, joined.padded), sharding)


@partial(jax.jit, static_argnums=(0, 1))
def _from_canonical(joined: _Joined, shardings: tuple[Any, ...], array: jax.Array) -> list[jax.Array]:
    array, found = shrunk(array, (*joined.layers.lead, *joined.shape)), []
    for path, stored, sharding in zip(joined.entry.paths, joined.stored, shardings, strict=True):
        leaf = joined.layers.each(partial(joined.entry.from_canonical, path=path))(array)
        found.append(jax.lax.with_sharding_constraint(grown(leaf, stored), sharding))
    return found


def _nodes(state: Any, kinds: tuple[type, ...]) -> list[tuple[str, Any]]:
    found = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda node: isinstance(node, kinds))[0]
    return [(jax.tree_util.keystr(path), node) for path, node in found if isinstance(node, kinds)]


def fields_in_torch(state: Any) -> dict[str, str]:
    """The name in torch of each field of the state but counts, by its path."""
    nodes = _nodes(state, tuple(IN_TORCH))
    return {
        f"{key}.{field}": name for key, node in nodes for field, name in IN_TORCH[type(node)].items() if name != STEP
    }


def counts_of(state: Any) -> dict[str, float]:
    """The number of steps of each field of the state, by its path."""
    found = {}
    for key, node in _nodes(state, tuple(IN_TORCH)):
        names = {name: field for field, name in IN_TORCH[type(node)].items()}
        if STEP in names:
            count = float(np.asarray(getattr(node, names[STEP])))
            found |= {f"{key}.{field}": count for field in names.values()}
    return found


def _names_in_torch(state: Any) -> dict[str, str]:
    """The name in torch of each field of the state, by its path, for kinds of state that occur once."""
    nodes = _nodes(state, tuple(IN_TORCH))
    times = Counter(type(node) for _, node in nodes)
    return {
        f"{key}.{field}": name
        for key, node in nodes
        if times[type(node)] == 1
        for field, name in IN_TORCH[type(node)].items()
    }


def _counts(state: Any) -> list[str]:
    return [f"{key}.count" for key, _ in _nodes(state, COUNTS)]
