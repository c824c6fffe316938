"""Cuts parameters in a pytree of arrays, sharded by the script or not, into the pieces of each rank."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from crossframe.errors import UsageError
from crossframe.layout import Layout, layouts_by_rows
from crossframe.param_map import MapEntry, ParamMap, identity_map
from crossframe.params import ParamSpec
from crossframe.recording.perturbed_runs import perturbed_values
from crossframe.unit_assignment import enclosing_unit
from jax_backend.recorder._device_ranks import Grid
from jax_backend.state._optimizer_state import counts_of, fields_in_torch
from jax_backend.tree import as_real, dtype_name, is_inexact, leaves_by_path, path_name

Pieces = dict[str, dict[str, tuple[int, int, Any]]]
"""By unit and parameter, (start, stop, values)."""


class ArrayPieces:
    """The ranks' pieces of the parameters of a pytree, by canonical name. A rank's piece is the rows that the core's
    per-parameter layout assigns to it, read from its own device if it has them.

    Args:
        params: floating arrays, or complex ones, which are pairs of real numbers in a recording.
        mesh, param_map, units: as of `Recorder`.

    Attributes:
        grid: the ranks.
        units: (unit, layout), the root first.
    """

    def __init__(
        self,
        params: Any,
        mesh: Mesh | None,
        param_map: ParamMap | None,
        units: Iterable[str] | None,
    ) -> None:
        leaves = leaves_by_path(params)
        wrong = {path: type(leaf).__name__ for path, leaf in leaves.items() if not is_inexact(leaf)}
        if wrong or not leaves:
            raise UsageError(f"params: expected a pytree of floating arrays, got {wrong or 'none'}; leave out all else")
        self.grid = Grid.of(leaves.values(), mesh)
        leaves = _as_reals(leaves)
        self.param_map = identity_map(leaves) if param_map is None else param_map
        self.param_map.check(self.param_map.by_name, leaves)
        specs = [_spec(entry, [leaves[path] for path in entry.paths]) for entry in self.param_map.entries]
        self.units = _units(
            specs, list_modules(self.param_map) if units is None else tuple(units), self.grid.spec.shard
        )
        self._shapes = {path: tuple(leaf.shape) for path, leaf in leaves.items()}

    def pieces(self, values: Any) -> dict[int, Pieces]:
        """The pieces of each rank of this process of a pytree like the parameters, such as their gradients; None has no
        pieces."""
        return self._pieces(
            _as_reals({path: leaf for path, leaf in leaves_by_path(values).items() if leaf is not None})
        )

    def unsharded(self, params: Any, rank: int) -> dict[str, dict[str, np.ndarray]]:
        """Full parameters in canonical shapes as a rank of this process has them, by unit and name.

        Args:
            params: a pytree like the parameters, without those that are not known.
        """
        leaves = _as_reals(leaves_by_path(params))
        found: dict[str, dict[str, np.ndarray]] = {}
        for unit, layout in self.units:
            for spec in layout.params:
                if all(path in leaves for path in self.param_map.by_name[spec.name].paths):
                    own = canonical_copies(self.grid, self.param_map, spec.name, leaves, [rank])[rank]
                    found.setdefault(unit, {})[spec.name] = own.reshape(spec.shape)
        return found

    def row(self, value: Mapping[int, np.ndarray], rank: int) -> np.ndarray:
        """A rank's part of an activation, which is known by rank."""
        return value[rank]

    def state(self, state: Any) -> tuple[dict[str, dict[int, Pieces]], dict[str, float]]:
        """(each rank's pieces of each optimizer state entry, the number of steps of each parameter)."""
        slots, counts = state_by_path(
            state, lambda path, leaf: leaf if np.shape(leaf) == self._shapes[path] else None, self._shapes
        )
        by_name = {each.name: count for path, count in counts.items() for each in self.param_map.of_path[path]}
        return {slot: self._pieces(leaves) for slot, leaves in slots.items()}, by_name

    def moved(self, params: Any, perturbed_run: int) -> Any:
        """The initial parameters of a perturbed run (`crossframe.recording.perturbed_runs`), on the same devices."""

        leaves = leaves_by_path(params)
        found = {path: as_real(_whole(leaf)).copy() for path, leaf in leaves.items()}
        for entry in self.param_map.entries:
            values = entry.to_canonical(*(found[path] for path in entry.paths))
            values = perturbed_values(entry.name, values, perturbed_run)
            for path in entry.paths:
                entry.write(found[path], values, path)
        return jax.tree.unflatten(
            jax.tree.structure(params), [placed_like(leaf, found[path]) for path, leaf in leaves.items()]
        )

    def _pieces(self, leaves: Mapping[str, Any]) -> dict[int, Pieces]:
        found: dict[int, Pieces] = {rank: {} for rank in self.grid.here}
        for unit, layout in self.units:
            copies = {}
            for spec in layout.params:
                paths = self.param_map.by_name[spec.name].paths
                if all(path in leaves for path in paths):
                    copies[spec.name] = canonical_copies(self.grid, self.param_map, spec.name, leaves)
            add_pieces(found, self.grid, unit, layout, copies)
        return found


def canonical_copies(
    grid: Grid, param_map: ParamMap, name: str, leaves: Mapping[str, Any], ranks: Iterable[int] | None = None
) -> dict[int, np.ndarray]:
    """A parameter, flattened, of each rank; `ranks` as of `Grid.copies`."""
    entry = param_map.by_name[name]
    by_path, found, made = [grid.copies(leaves[path], ranks) for path in entry.paths], {}, {}
    for rank in by_path[0]:
        parts = [copies[rank] for copies in by_path]
        key = tuple(map(id, parts))
        if key not in made:  # ranks mostly share an array
            made[key] = np.ascontiguousarray(entry.to_canonical(*parts)).reshape(-1)
        found[rank] = made[key]
    return found


def add_pieces(
    found: dict[int, Pieces], grid: Grid, unit: str, layout: Layout, copies: Mapping[str, Mapping[int, np.ndarray]]
) -> None:
    """Add the pieces of full parameters, by a layout of rows."""
    for rank in grid.here:
        for piece in layout.pieces(grid.spec.coordinate(rank)[1]):
            if piece.name in copies:
                start, stop = piece.param_start, piece.param_stop
                found[rank].setdefault(unit, {})[piece.name] = (start, stop, copies[piece.name][rank][start:stop])


def state_by_path(
    state: Any, take: Callable[[str, Any], Any], paths: Iterable[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """(the optimizer state entries of parameters, by name and path, the number of steps by path) in a state of optax.

    An entry of a parameter is a leaf whose path ends with the parameter's. The states of several models are a dict by the first
    parts of their parameters' paths.

    Args:
        take: (path of the parameter, leaf) to its values; None if the leaf does not belong to the parameter.
        paths: of the parameters.
    """
    names, counts, known = fields_in_torch(state), counts_of(state), set(paths)
    slots: dict[str, dict[str, Any]] = {}
    stepped: dict[str, float] = {}
    for key, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        # A count has the path and the shape of a parameter that is a bare scalar.
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            continue
        leaf = as_real(leaf)
        for first in range(len(key) + 1):
            path, before, inner = path_name(key[first:]), key[:first], key[:first]
            if first and (of_model := f"{path_name(key[:1])}.{path}") in known:
                path, inner = of_model, key[1:first]
            if path not in known or (values := take(path, leaf)) is None:
                continue
            field = jax.tree_util.keystr(before)
            slot = names.get(field, slot_name(path_name(inner)))
            if path in slots.get(slot, {}):  # kept twice: the paths of both tell them apart
                slot = slot_name(path_name(inner))
            slots.setdefault(slot, {})[path] = values
            if (count := counts.get(field)) is not None:
                stepped[path] = count
            break
    return slots, stepped


def slot_name(name: str) -> str:
    """A valid name of an optimizer state entry in a recording."""
    return re.sub(r"[^\w.]", "_", name).lstrip("._")[-64:] or "state"


def list_modules(param_map: ParamMap) -> tuple[str, ...]:
    """The members of the longest list of modules, with names such as "blocks.0", which are usually units.

    >>> list_modules(identity_map(["inp.w", "blocks.0.w", "blocks.1.a.w", "blocks.1.b.w", "heads.0.w"]))
    ('blocks.0', 'blocks.1')
    """
    lists: dict[str, dict[str, None]] = {}
    for entry in param_map.entries:
        parts = entry.name.split(".")
        for i, part in enumerate(parts[1:-1], 1):
            if part.isdecimal():
                lists.setdefault(".".join(parts[:i]), {})[".".join(parts[: i + 1])] = None
    longest = max(lists.values(), key=len, default={})
    return tuple(longest) if len(longest) > 1 else ()


def placed_like(leaf: Any, values: np.ndarray) -> Any:
    """Values with the sharding of a leaf, those of a complex one as `as_real` gives them."""
    if jnp.iscomplexobj(leaf):
        values = np.ascontiguousarray(values).view(np.result_type(leaf))[..., 0]
    if not isinstance(leaf, jax.Array):
        return values
    if not leaf.committed:  # jit may move it to other devices
        return jax.numpy.asarray(values)
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: values[index])


def _as_reals(leaves: Mapping[str, Any]) -> dict[str, Any]:
    return {path: as_real(leaf) for path, leaf in leaves.items()}


def _whole(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise UsageError(
            "a perturbed run of several processes: expected ShardedParams, got arrays of other processes too"
        )
    return np.asarray(leaf)


def _spec(entry: MapEntry, leaves: list[Any]) -> ParamSpec:
    return ParamSpec(entry.name, entry.canonical_shape(*(tuple(leaf.shape) for leaf in leaves)), dtype_name(leaves[0]))


def _units(specs: list[ParamSpec], names: tuple[str, ...], world_size: int) -> tuple[tuple[str, Layout], ...]:
    known, owned = frozenset({"", *names}), {name: [] for name in ("", *names)}
    for spec in specs:
        owned[enclosing_unit(spec.name.rpartition(".")[0], known)].append(spec)
    if empty := [name for name in names if not owned[name]]:
        raise UsageError(f"units: expected modules that own parameters, but {empty} own none")
    return tuple((unit, layout) for unit, members in owned.items() for layout in layouts_by_rows(members, world_size))
