"""Optimizer state by name and by id, and parameter groups with their hyperparameters (R37).

The state dict of an optimizer is `{"state": {key: ...}, "param_groups": [{"params": [key, ...], "lr": ...}, ...]}`. Keys are
either ids, which number the optimizer's parameters in order, group after group; or names, which mean the same in another
process, at another world size and in the unwrapped model. Parameters without state are in a group and not in `state`.

Optimizers match ids by position when they load. A state dict is therefore brought into the order of the optimizer that loads it,
both groups and parameters; if the groups differ, it is rejected.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from crossframe.errors import StateDictError
from crossframe.params import ParamSpec
from crossframe.shown import shown

StateDict = Mapping[str, Any]
Groups = Sequence[Mapping[str, Any]]


def state_by_name(state_dict: StateDict, own: Sequence[Sequence[ParamSpec]]) -> dict[str, Any]:
    """Convert a state dict by id to one by name.

    Args:
        own: the optimizer's groups of parameters, in the order that the ids number.

    Raises:
        StateDictError: not a state dict; an id of no parameter; or a parameter in no group or in two.

    >>> by_id = {"state": {1: {"step": 3}}, "param_groups": [{"params": [0], "lr": 0.1}, {"params": [1], "lr": 0.2}]}
    >>> state_by_name(by_id, [[ParamSpec("w", (2,))], [ParamSpec("b", (2,))]])
    {'state': {'b': {'step': 3}}, 'param_groups': [{'params': ['w'], 'lr': 0.1}, {'params': ['b'], 'lr': 0.2}]}
    """
    return _rekeyed(state_dict, {i: spec.name for i, spec in enumerate(_in_a_row(own))})


def state_by_id(state_dict: StateDict, own: Sequence[Sequence[ParamSpec]]) -> dict[str, Any]:
    """Convert a state dict by name or alias to one by the ids of the optimizer that has these groups.

    Raises:
        StateDictError: not a state dict; a name of no parameter; a parameter in no group or in two; or groups other than the
            optimizer's, in any order.

    >>> by_name = {"state": {"b": {"step": 3}}, "param_groups": [{"params": ["w"], "lr": 0.1}, {"params": ["b"], "lr": 0.2}]}
    >>> state_by_id(by_name, [[ParamSpec("b", (2,))], [ParamSpec("w", (2,))]])
    {'state': {0: {'step': 3}}, 'param_groups': [{'params': [0], 'lr': 0.2}, {'params': [1], 'lr': 0.1}]}
    """
    flat = _in_a_row(own)
    by_id = _rekeyed(state_dict, {name: i for i, spec in enumerate(flat) for name in (spec.name, *spec.aliases)})
    numbers = iter(range(len(flat)))
    return by_id | {"param_groups": _in_order(by_id["param_groups"], [[next(numbers) for _ in group] for group in own])}


def ungrouped_units(groups: Groups, units: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Convert groups of flat parameters to groups of the parameters inside them.

    Args:
        groups: parameter groups whose `params` are indices of units.
        units: the names of the parameters of each unit, in order.

    Raises:
        StateDictError: not a list of groups; an index of no unit; or a unit in no group or in two.

    >>> ungrouped_units([{"params": [1, 0], "lr": 0.1}], [["a", "b"], ["c"]])
    [{'params': ['c', 'a', 'b'], 'lr': 0.1}]
    """
    found = _rekeyed({"state": {}, "param_groups": groups}, {i: i for i in range(len(units))})["param_groups"]
    return [group | {"params": [name for i in group["params"] for name in units[i]]} for group in found]


def grouped_units(groups: Groups, units: Sequence[Sequence[str]], own: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Convert groups of parameters to groups of the flat parameters that hold them: the inverse of `ungrouped_units`.

    Args:
        own: the groups of the optimizer that loads them, as indices of units.

    Raises:
        StateDictError: the parameters of a unit are in two groups, since a flat parameter has one learning rate. Also if `groups`
            is not a list of groups, a name is of no unit, a parameter is in no group or in two, or the groups are not the
            optimizer's.
    """
    owner = {name: i for i, names in enumerate(units) for name in names}
    found, group_of = [], {}
    for at, group in enumerate(_rekeyed({"state": {}, "param_groups": groups}, {n: n for n in owner})["param_groups"]):
        for name in group["params"]:
            first_at, first = group_of.setdefault(owner[name], (at, name))
            if first_at != at:
                raise StateDictError(
                    f"{first!r} is in parameter group {first_at} and {name!r} in group {at}, but one flat parameter holds "
                    "both: put them into one group, or keep original parameters (use_orig_params=True)"
                )
        found.append(group | {"params": list(dict.fromkeys(owner[name] for name in group["params"]))})
    return _in_order(found, own)


def _in_order(groups: Groups, own: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """The groups in the optimizer's order, each with its parameters in the optimizer's order."""
    by_members = {frozenset(group["params"]): group for group in groups}
    if len(groups) != len(own) or any(frozenset(members) not in by_members for members in own):
        raise StateDictError(
            f"the state dict groups parameters as {shown([group['params'] for group in groups])} (by the optimizer's ids), the "
            f"optimizer as {shown([list(members) for members in own])}: build the optimizer with the groups that were saved"
        )
    return [{**by_members[frozenset(members)], "params": list(members)} for members in own]


def _rekeyed(state_dict: StateDict, keys: Mapping[Any, Any]) -> dict[str, Any]:
    """The state dict with every key replaced. Several old keys, such as aliases, may have one new key."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise StateDictError(f"expected an optimizer's 'state' and 'param_groups', got {shown(state_dict)}")
    state, groups = state_dict["state"], state_dict["param_groups"]
    if not isinstance(state, Mapping) or not isinstance(groups, Sequence):
        raise StateDictError(f"expected 'state' by key and a list of 'param_groups', got {shown(state_dict)}")
    for group in groups:
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list | tuple):
            raise StateDictError(f"expected a parameter group with a list of 'params', got {shown(group)}")
    used = [*state, *(key for group in groups for key in group["params"])]
    if unknown := sorted({shown(key) for key in used if not _known(key, keys)}):
        raise StateDictError(
            f"the optimizer state names {', '.join(unknown)}, which this optimizer does not hold: expected "
            f"{shown(sorted(keys))}"
        )
    new_groups, taken = [], {}
    for at, group in enumerate(groups):
        params = [keys[key] for key in group["params"]]
        for key in params:
            if taken.setdefault(key, at) != at:
                raise StateDictError(
                    f"parameter {shown(key)} is in the groups {taken[key]} and {at}: expected it in one"
                )
        new_groups.append({**group, "params": params})
    if without := [key for key in dict.fromkeys(keys.values()) if key not in taken]:
        raise StateDictError(
            f"parameters {shown(without)} of this optimizer are in no parameter group of the state dict"
        )
    return {**state_dict, "state": {keys[key]: value for key, value in state.items()}, "param_groups": new_groups}


def _in_a_row(own: Sequence[Sequence[ParamSpec]]) -> list[ParamSpec]:
    if not isinstance(own, Sequence) or not all(isinstance(group, list | tuple) for group in own):
        raise StateDictError(f"expected the optimizer's groups as lists of ParamSpec, got {shown(own)}")
    flat = [spec for group in own for spec in group]
    if wrong := [spec for spec in flat if not isinstance(spec, ParamSpec)]:
        raise StateDictError(f"expected the optimizer's groups as lists of ParamSpec, got {shown(wrong[0])} among them")
    return flat


def _known(key: object, keys: Mapping[Any, Any]) -> bool:
    return isinstance(key, Hashable) and not isinstance(key, bool) and key in keys
