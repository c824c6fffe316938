"""Optimizer state over shards and over full parameters (R37).

The same state has three forms, each by parameter name and then by the optimizer's name of the entry:

- *full*: arrays in the parameters' shapes, as in the optimizer of the unwrapped model;
- *held*: one rank's pieces, if the optimizer holds the original parameters;
- *flat*: one rank's buffers of `padded_shard_numel` elements for a whole unit, if the optimizer holds flat parameters. These
  have the layout of the shard, so `overlay` moves them between layouts too.

A parameter without state is absent from all of them. Values are numpy arrays or plain Python values.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from crossframe.errors import MeshError, StateDictError
from crossframe.layout import Layout, Piece
from crossframe.mesh import check_rank
from crossframe.params import ParamSpec
from crossframe.shown import shown
from crossframe.state.roles import Role, agreed, classify, same_value, seen

ParamState = Mapping[str, Any]
State = Mapping[str, ParamState]


def gather_state(layout: Layout, held: Sequence[State]) -> dict[str, dict[str, Any]]:
    """The full state of a unit from the state that each rank holds.

    Args:
        held: state by rank of the shard group. Elementwise values are the pieces of a parameter in the shard, row by row, in any
            shape. A rank that holds no element of a parameter may lack its state.

    Raises:
        StateDictError: see `classify` and `agreed`; a name of no parameter; a parameter without dims.
    """
    ranks = _by_rank(layout, held)
    found = {}
    by_name = [_pieces_by_name(layout, rank) for rank in range(len(ranks))]
    for state in ranks:
        _check_names(layout, state)
    for spec in layout.params:
        states = [_of(spec, state) for state in ranks]
        pieces = [own.get(spec.name, []) for own in by_name]
        numels = [sum(piece.numel for piece in own) for own in pieces]
        full = {}
        for entry in _entries(states):
            values = {rank: state[entry] for rank, state in enumerate(states) if entry in state}
            role = classify(
                spec.name, entry, [seen(state[entry]) if entry in state else None for state in states], numels
            )
            if role is Role.ELEMENTWISE:
                lines = [(piece, values[rank].reshape(-1)) for rank, own in enumerate(pieces) for piece in own]
                full[entry] = _assembled(spec, lines, next(iter(values.values())).dtype)
            else:
                full[entry] = _copied(agreed(spec.name, entry, values, numels))
        if full:
            found[spec.name] = full
    return found


def shard_state(layout: Layout, full: State, rank: int) -> dict[str, dict[str, Any]]:
    """The part of a full state that one rank holds: its pieces as 1-D arrays, and every scalar.

    A rank without elements of a parameter gets empty arrays and the scalars, since it must step as the others do.

    Raises:
        StateDictError: an array has neither the parameter's shape nor one element; a name of no parameter; a parameter without
            dims.
        MeshError: `rank` is not a rank of the layout.
    """
    _check_names(layout, full)
    found, by_name = {}, _pieces_by_name(layout, rank)
    for spec in layout.params:
        own, state = by_name.get(spec.name, []), {}
        for entry, value in _of(spec, full).items():
            if _full_role(spec, entry, value) is Role.ELEMENTWISE:
                runs = [line for piece in own for _, line in _runs(piece, value.reshape(-1))]
                state[entry] = np.concatenate([np.empty(0, value.dtype), *runs])
            else:
                state[entry] = _copied(value)
        if state:
            found[spec.name] = state
    return found


def unflatten_state(layout: Layout, flat: Sequence[ParamState], unit: str = "") -> dict[str, dict[str, Any]]:
    """The full state of every parameter of a unit from the state of its flat parameter on all ranks.

    Args:
        flat: state by rank of the shard group; elementwise values have shape (padded_shard_numel,). Padding is dropped.
        unit: name of the unit, for errors.

    Raises:
        StateDictError: see `classify` and `agreed`; a parameter without dims.
    """
    ranks = _by_rank(layout, flat)
    owner = f"{unit!r} as one flat parameter"
    numels = [layout.padded_shard_numel] * len(ranks)
    by_name = [_pieces_by_name(layout, rank) for rank in range(len(ranks))]
    found: dict[str, dict[str, Any]] = {spec.name: {} for spec in layout.params if _has_dims(spec)}
    for entry in _entries(ranks):
        values = {rank: state[entry] for rank, state in enumerate(ranks) if entry in state}
        role = classify(owner, entry, [seen(state[entry]) if entry in state else None for state in ranks], numels)
        common = agreed(owner, entry, values, numels) if role is Role.SCALAR else None
        for spec in layout.params:
            if role is Role.SCALAR:
                found[spec.name][entry] = _copied(common)
                continue
            lines = [
                (piece, values[rank].reshape(-1)[piece.shard_start : piece.shard_stop])
                for rank in values
                for piece in by_name[rank].get(spec.name, [])
            ]
            found[spec.name][entry] = _assembled(spec, lines, next(iter(values.values())).dtype)
    return {name: state for name, state in found.items() if state}


def flatten_state(layout: Layout, full: State, rank: int, unit: str = "") -> dict[str, Any]:
    """The state of a unit's flat parameter on one rank, from the full state of its parameters. Padding is 0.

    A parameter without state beside others with state counts as zeros, as in torch, but only if there are no scalars: a flat
    parameter has one `step`, which cannot mean "never" for one of its parameters and "ten times" for another.

    Returns:
        Elementwise entries of shape (padded_shard_numel,), and scalars; empty if no parameter has state.

    Raises:
        StateDictError: the names, roles, dtypes or scalars of the state differ between parameters of the unit; also as in
            `shard_state`.
    """
    check_rank(rank, layout.world_size)
    _check_names(layout, full)
    states = {spec.name: state for spec in layout.params if (state := _of(spec, full))}
    first = next(iter(states), "")
    for name, state in states.items():
        if state.keys() != states[first].keys():
            raise _differing(unit, "names of state", first, sorted(states[first]), name, sorted(state))
    flat = {}
    for entry in states[first] if states else ():
        values = {name: state[entry] for name, state in states.items()}
        if _common_role(layout, entry, values, unit) is Role.SCALAR:
            flat[entry] = _copied(values[first])
            continue
        flat[entry] = np.zeros(layout.padded_shard_numel, values[first].dtype)
        for piece in layout.pieces(rank):
            if piece.name in values:
                for start, line in _runs(piece, values[piece.name].reshape(-1)):
                    flat[entry][start : start + line.size] = line
    return flat


def _common_role(layout: Layout, entry: str, values: Mapping[str, Any], unit: str) -> Role:
    """The role of an entry, the same for all parameters of a flat parameter; StateDictError if they differ."""
    specs = {spec.name: spec for spec in layout.params}
    first = next(iter(values))
    roles = {name: _full_role(specs[name], entry, value) for name, value in values.items()}
    for name, role in roles.items():
        if role is not roles[first]:
            raise _differing(unit, f"roles of state {entry!r}", first, roles[first].value, name, role.value)
        if role is Role.SCALAR and not same_value(values[name], values[first]):
            raise _differing(unit, f"values of state {entry!r}", first, values[first], name, values[name])
        if role is Role.ELEMENTWISE and values[name].dtype != values[first].dtype:
            raise _differing(unit, f"dtypes of state {entry!r}", first, values[first].dtype, name, values[name].dtype)
    if roles[first] is Role.SCALAR and (missing := [name for name in specs if name not in values]):
        raise _differing(unit, f"values of state {entry!r}", first, values[first], missing[0], None)
    return roles[first]


def _pieces_by_name(layout: Layout, rank: int) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = {}
    for piece in layout.pieces(rank):
        found.setdefault(piece.name, []).append(piece)
    return found


def _assembled(spec: ParamSpec, lines: Iterable[tuple[Piece, np.ndarray]], dtype: np.dtype) -> np.ndarray:
    """A full array from the pieces of all ranks, each given with its elements in one line."""
    full = np.empty(spec.numel, dtype)
    for piece, line in lines:
        for shard_start, param_start, numel in piece.runs():
            start = shard_start - piece.shard_start
            full[param_start : param_start + numel] = line[start : start + numel]
    return full.reshape(spec.shape)


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def _runs(piece: Piece, full: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """The runs of a piece of a flattened full array, each with its start in the shard."""
    return [(start, full[first : first + numel]) for start, first, numel in piece.runs()]


def _full_role(spec: ParamSpec, entry: str, value: Any) -> Role:
    what = seen(value)
    if what.shape and what.shape == spec.shape:
        return Role.ELEMENTWISE
    if not what.shape or what.numel == 1:
        return Role.SCALAR
    raise StateDictError(
        f"state {entry!r} of {spec.name!r}: expected the parameter's shape {spec.shape} or one value, got an array of shape "
        f"{shown(what.shape)}; save what is factored or shared between elements on its own"
    )


def _entries(states: Iterable[ParamState]) -> list[str]:
    """Every entry name that occurs, in order of first occurrence."""
    return list(dict.fromkeys(entry for state in states for entry in state))


def _of(spec: ParamSpec, state: State) -> ParamState:
    """The state of a parameter, under its name or an alias; empty if it has none."""
    found = next((state[name] for name in (spec.name, *spec.aliases) if name in state), {})
    if not isinstance(found, Mapping):
        raise StateDictError(f"state of {spec.name!r}: expected values by entry name, got {shown(found)}")
    if found:
        _has_dims(spec)
    return found


def _has_dims(spec: ParamSpec) -> bool:
    if not spec.shape:
        raise StateDictError(
            f"parameter {spec.name!r} has no dims, so its elementwise state and its scalars look alike; give it shape (1,)"
        )
    return True


def _check_names(layout: Layout, state: State) -> None:
    if not isinstance(state, Mapping):
        raise StateDictError(f"expected the state of parameters by name, got {shown(state)}")
    known = {name for spec in layout.params for name in (spec.name, *spec.aliases)}
    if unknown := sorted(shown(name) for name in state if name not in known):
        raise StateDictError(f"state of {', '.join(unknown)}: expected parameters of this unit, {shown(sorted(known))}")


def _by_rank(layout: Layout, states: Sequence[Any]) -> Sequence[Any]:
    if not isinstance(states, Sequence) or len(states) != layout.world_size:
        raise MeshError(f"expected the state of {layout.world_size} ranks in order, got {shown(states)}")
    for state in states:
        if not isinstance(state, Mapping):
            raise StateDictError(f"expected a rank's state as values by name, got {shown(state)}")
    return states


def _differing(unit: str, what: str, first: str, expected: Any, name: str, got: Any) -> StateDictError:
    return StateDictError(
        f"unit {unit!r} holds its parameters as one, and their {what} differ: {first!r} has {shown(expected)}, {name!r} has "
        f"{shown(got)}; keep original parameters (use_orig_params=True), or start their state anew"
    )
