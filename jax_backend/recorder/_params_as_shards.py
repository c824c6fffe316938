"""Cuts parameters in ShardedParams into the pieces of each rank."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from crossframe.layout import Layout, PerParamLayout, Piece
from crossframe.param_map import MapEntry, ParamMap
from crossframe.params import ParamSpec
from crossframe.recording.perturbed_runs import perturbed_values
from crossframe.trace import Event
from jax_backend.mesh._device_mesh import device_of, mesh_spec, num_ranks
from jax_backend.mesh._rank_parts import check_in_one_process
from jax_backend.optimizer._sharded_optimizer import true_shape
from jax_backend.recorder._device_ranks import Grid
from jax_backend.recorder._params_as_arrays import Pieces, slot_name, state_by_path
from jax_backend.shards._bucket import Bucket
from jax_backend.shards._param_tree import ParamTree
from jax_backend.shards._sharded_params import ShardedParams, from_lines, mesh_of, shards_of
from jax_backend.state._optimizer_state import counts_of, fields_in_torch


class ShardPieces:
    """The ranks' pieces of ShardedParams, by canonical name. Each layer of a stacked unit is a unit with the name of torch's list
    of blocks. Parameters that are sharded on another dim than the first are recorded by rows.

    Args:
        sharded: the parameters that are recorded, with or without frozen ones.

    Attributes:
        grid: the ranks.
        units: (unit, layout), the root first.
    """

    def __init__(self, sharded: ShardedParams) -> None:
        mesh = mesh_of(sharded)
        present = tuple(bucket for bucket in sharded.tree.buckets if bucket.name in sharded.buckets)
        self.tree = replace(sharded.tree, buckets=present)
        for rank in range(num_ranks(mesh)):
            check_in_one_process(mesh, rank)
        self.grid = Grid(mesh_spec(mesh), tuple(device_of(mesh, rank) for rank in range(num_ranks(mesh))), mesh)
        self._units = {bucket.name: _units(bucket) for bucket in self.tree.buckets}
        self.units = tuple(unit for units in self._units.values() for unit in units)
        self.param_map = _map_by_layer(self.tree)
        self._found_pieces: dict[tuple[str, int], list[dict[str, Piece]]] = {}

    def pieces(self, values: ShardedParams) -> dict[int, Pieces]:
        """The pieces of each rank of this process of parameters, gradients or optimizer state."""
        found: dict[int, Pieces] = {rank: {} for rank in self.grid.here}
        values = self._placed(values)
        for name, arrays in values.buckets.items():
            if (bucket := self.tree.by_name[name]).by_rows:
                continue
            # Padding, if any, is after the last row.
            for spec in bucket.layout.params:
                self._add_whole(found, bucket, spec.name, self.grid.copies(arrays[spec.name]))
        for rank in self.grid.here:
            place = self.grid.spec.coordinate(rank)[1]
            for name, buffer in shards_of(values, rank).items():
                if (bucket := self.tree.by_name[name]).by_rows:
                    for (unit, layout), line in zip(self._units[name], bucket.layers.split(buffer), strict=True):
                        for p in layout.pieces(place):
                            piece = (p.param_start, p.param_stop, line[p.shard_start : p.shard_stop])
                            found[rank].setdefault(unit, {})[p.name] = piece
        return found

    def state(self, state: Any) -> tuple[dict[str, dict[int, Pieces]], dict[str, float]]:
        """(each rank's pieces of each optimizer state entry, the number of steps of each parameter)."""
        names, counts = fields_in_torch(state), counts_of(state)
        nodes = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda node: isinstance(node, ShardedParams))[0]
        slots: dict[str, dict[int, Pieces]] = {}
        taken: dict[str, set[str]] = {}
        stepped: dict[str, float] = {}
        for key, node in nodes:
            if isinstance(node, ShardedParams) and (kept := _of_parameters(node)).shards:
                field = jax.tree_util.keystr(key)
                slot = names.get(field, slot_name(field))
                if not taken.setdefault(slot, set()).isdisjoint(kept.shards):  # kept twice
                    slot = slot_name(field)
                taken.setdefault(slot, set()).update(kept.shards)
                for rank, pieces in self.pieces(kept).items():
                    slots.setdefault(slot, {}).setdefault(rank, {}).update(pieces)
                if field in counts:
                    stepped |= {spec.name: counts[field] for name in kept.shards for spec in self._specs(name)}
        leaves = self.tree.trained_leaves
        by_path, counted = state_by_path(state, self._cut, leaves)
        for slot, kept in by_path.items():
            found: dict[int, Pieces] = {rank: {} for rank in self.grid.here}
            for bucket, i in dict.fromkeys(leaves.values()):
                name = bucket.layout.params[i].name
                entry = self.tree.param_map.by_name[name]
                if all(path in kept for path in entry.paths):
                    of_rank = {
                        rank: _canonical(bucket, entry, [kept[path][rank] for path in entry.paths])
                        for rank in self.grid.here
                    }
                    self._add_whole(found, bucket, name, of_rank)
            for rank, pieces in found.items():
                slots.setdefault(slot, {}).setdefault(rank, {}).update(pieces)
        for path, count in counted.items():
            bucket, i = leaves[path]
            stepped |= dict.fromkeys(_names(bucket, bucket.layout.params[i].name), count)
        return slots, stepped

    def _cut(self, path: str, leaf: Any) -> dict[int, np.ndarray] | None:
        """A leaf of the state of each rank, without padding; None if it belongs to no parameter."""
        shape = true_shape((jax.tree_util.DictKey(path),), leaf, self.tree)
        if shape is None:
            return None
        cut = tuple(slice(size) for size in shape)
        return {rank: whole[cut] for rank, whole in self.grid.copies(leaf).items()}

    def moved(self, params: ShardedParams, perturbed_run: int) -> ShardedParams:
        """The initial parameters of a perturbed run (`crossframe.recording.perturbed_runs`)."""
        by_unit = self._gathered(params, self.grid.here[0]).values()
        full = {name: array for by_name in by_unit for name, array in by_name.items()}
        leaves: dict[str, Any] = {}
        for name, bucket in self.tree.bucket_of.items():
            entry = self.tree.param_map.by_name[name]
            made = [perturbed_values(own, full[own], perturbed_run) for own in _names(bucket, name)]
            for path in entry.paths:
                leaves[path] = bucket.layers.join([entry.from_canonical(each, path) for each in made])
        found = from_lines(self.tree, self.grid.mesh, lambda path, _: leaves[path])
        return ShardedParams.of(params.tree, found.buckets)

    def _placed(self, values: ShardedParams) -> ShardedParams:
        """Values on the devices of their shards. XLA may have placed those elsewhere that it computed by itself."""
        mesh = self.grid.mesh

        def placed(at: NamedSharding, array: Any) -> Any:
            # Replicas may differ: an array that is in its place is not moved.
            is_there = isinstance(array, jax.Array) and array.sharding.is_equivalent_to(at, array.ndim)
            return array if is_there else jax.device_put(array, at)

        return ShardedParams.of(
            values.tree,
            {
                name: jax.tree.map(placed, self.tree.by_name[name].shardings(mesh), arrays)
                for name, arrays in values.buckets.items()
            },
        )

    def row(self, value: Any, rank: int) -> np.ndarray:
        """A rank's part of an activation: its row of an array with a leading dim of ranks, or what a dict by rank has."""
        return value[rank] if isinstance(value, Mapping) else self.grid.rows(value, rank)[0]

    def unsharded(self, params: ShardedParams | Mapping[str, Any], rank: int) -> dict[str, dict[str, np.ndarray]]:
        """Full parameters in canonical shapes as a rank of this process has them, by unit and name.

        Args:
            params: the shards; or the leaves by path, with a leading dim of ranks, without those that are not known.
        """
        if isinstance(params, ShardedParams):
            return self._gathered(params, rank)
        leaves = {path: self.row(leaf, rank) for path, leaf in params.items()}
        found: dict[str, dict[str, np.ndarray]] = {}
        for bucket in self.tree.buckets:
            for spec in bucket.layout.params:
                entry = self.tree.param_map.by_name[spec.name]
                if all(path in leaves for path in entry.paths):
                    value = entry.to_canonical(*(leaves[path] for path in entry.paths))
                    found.setdefault(bucket.unit, {})[spec.name] = value
        return found

    def whole(self, bucket: str, line: np.ndarray) -> dict[str, dict[str, np.ndarray]]:
        """Full parameters in canonical shapes, by unit and name, from a bucket's gathered buffer."""
        lines = self.tree.by_name[bucket].layers.split(line)
        found: dict[str, dict[str, np.ndarray]] = {}
        for (unit, layout), each in zip(self._units[bucket], lines, strict=True):
            views = self.tree.views(bucket, each).values()
            found.setdefault(unit, {}).update(zip((spec.name for spec in layout.params), views, strict=True))
        return found

    def _gathered(self, params: ShardedParams, rank: int) -> dict[str, dict[str, np.ndarray]]:
        found: dict[str, dict[str, np.ndarray]] = {}
        for name, arrays in params.buckets.items():
            bucket = self.tree.by_name[name]
            full = bucket.to_params(jax.tree.map(lambda array: self.grid.copies(array, [rank])[rank], arrays))
            layers = zip(*(bucket.layers.split(np.asarray(full[each])) for each in bucket.indices), strict=True)
            for (unit, layout), own in zip(self._units[name], layers, strict=True):
                found.setdefault(unit, {}).update(zip((spec.name for spec in layout.params), own, strict=True))
        return found

    def _specs(self, bucket: str) -> Iterator[ParamSpec]:
        for _, layout in self._units[bucket]:
            yield from layout.params

    def _add_whole(self, found: dict[int, Pieces], bucket: Bucket, name: str, copies: Mapping[int, np.ndarray]) -> None:
        """Add the pieces, by rows, of a parameter that each rank has in full."""
        i = bucket.indices[name]
        for rank, whole in copies.items():
            by_layer = self._pieces_at(bucket.name, self.grid.spec.coordinate(rank)[1])
            layers = bucket.layers.split(whole)
            for (unit, layout), pieces, each in zip(self._units[bucket.name], by_layer, layers, strict=True):
                called = layout.params[i].name
                if piece := pieces.get(called):
                    start, stop = piece.param_start, piece.param_stop
                    found[rank].setdefault(unit, {})[called] = (start, stop, each.reshape(-1)[start:stop])

    def _pieces_at(self, bucket: str, place: int) -> list[dict[str, Piece]]:
        """The pieces of a bucket at an index of the shard group, by parameter, for each layer. The layout is by rows, so that a
        parameter has at most one piece."""
        if (bucket, place) not in self._found_pieces:
            layouts = [layout for _, layout in self._units[bucket]]
            self._found_pieces[bucket, place] = [
                {piece.name: piece for piece in layout.pieces(place)} for layout in layouts
            ]
        return self._found_pieces[bucket, place]


def _units(bucket: Bucket) -> tuple[tuple[str, Layout], ...]:
    """A bucket's units as they are recorded: one for each layer, if it is stacked."""
    layout = bucket.layout if bucket.by_rows else PerParamLayout(bucket.layout.params, bucket.layout.world_size)
    return bucket.layers.units(bucket.unit, layout)


def _names(bucket: Bucket, name: str) -> list[str]:
    """The names of a parameter in a recording, one for each layer."""
    return [rename(name) for rename in bucket.layers.renames(bucket.unit)]


def recorded_collectives(tree: ParamTree, events: Iterable[Event]) -> Iterator[Event]:
    """The collectives of one call of a step by the units of its recording: those of a stacked unit by layer, and none of frozen
    parameters."""
    buckets = {(bucket.unit, bucket.index): bucket for bucket in tree.buckets}
    seen: Counter[tuple[str, ...]] = Counter()
    for event in events:
        bucket = buckets.get((event.unit, event.bucket))
        if bucket is None:  # the loss function's own
            yield event
        elif bucket.trainable:
            units, of_bucket = _units(bucket), (event.kind, event.phase, bucket.name)
            unit, _ = units[seen[of_bucket] % len(units)]
            seen[of_bucket] += 1
            yield replace(event, unit=unit)


def trained_names(tree: ParamTree) -> list[str]:
    """The names in a recording of the trained parameters."""
    return _names_in(tree.trainable)


def frozen_names(tree: ParamTree) -> list[str]:
    """The names that frozen parameters would have in a recording."""
    return _names_in([bucket for bucket in tree.buckets if not bucket.trainable])


def _names_in(buckets: Iterable[Bucket]) -> list[str]:
    specs = ((bucket, spec) for bucket in buckets for spec in bucket.layout.params)
    return [name for bucket, spec in specs for name in _names(bucket, spec.name)]


def names_by_path(tree: ParamTree) -> dict[str, list[str]]:
    """The names in a recording of the parameters in each of the user's leaves, by its path."""
    names = {path: tree.entry(path).name for path in tree.paths}
    return {path: _names(tree.bucket_of[name], name) for path, name in names.items()}


def _map_by_layer(tree: ParamTree) -> ParamMap:
    entries = (entry for entry in tree.param_map.entries if entry.name in tree.bucket_of)
    return ParamMap(tuple(each for entry in entries for each in _entries(tree.bucket_of[entry.name], entry)))


def _entries(bucket: Bucket, entry: MapEntry) -> Sequence[MapEntry]:
    if not bucket.lead:
        return [entry]

    def of_layer(layer: int, name: str) -> MapEntry:
        paths = tuple(f"{path}[{layer}]" for path in entry.paths)
        return replace(entry, name=name, path=paths if isinstance(entry.path, tuple) else paths[0])

    return [of_layer(*each) for each in enumerate(_names(bucket, entry.name))]


def _canonical(bucket: Bucket, entry: MapEntry, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """A parameter in numpy, with its layers."""
    return bucket.layers.join(
        [entry.to_canonical(*parts) for parts in zip(*map(bucket.layers.split, arrays), strict=True)]
    )


def _of_parameters(node: ShardedParams) -> ShardedParams:
    """The buckets of a node of the state that have arrays, which masks and empty nodes have not."""
    return ShardedParams(
        {name: arrays for name, arrays in node.shards.items() if node.tree.by_name[name].fits(arrays)},
        node.tree,
    )
