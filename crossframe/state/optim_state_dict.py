"""Whether the optimizer state in a state dict fits the parameters that it is loaded into, and keys of parameter groups (R37).

In a state dict, elementwise state has the shape of its parameter, whether a rank has all of it or a part.
"""

import copy
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from crossframe.errors import StateDictError
from crossframe.params import ParamSpec
from crossframe.quoting import quote
from crossframe.state.roles import Description, Role, Seen, same_value

Groups = Sequence[Mapping[str, Any]]


def role_in_full(spec: ParamSpec, value: Seen) -> Role | None:
    """The role of an entry of a state dict; None if it has neither.

    >>> spec = ParamSpec("w", (2, 1))
    >>> [role_in_full(spec, Seen(shape, "float32")) for shape in ((2, 1), (), None, (2,))]
    [<Role.ELEMENTWISE: 'elementwise'>, <Role.SCALAR: 'scalar'>, <Role.SCALAR: 'scalar'>, None]
    """
    if value.shape == spec.shape:
        return Role.ELEMENTWISE
    return Role.SCALAR if value.numel == 1 else None


def unfit_state(
    params: Sequence[ParamSpec], state: Mapping[str, Mapping[str, Description]], *, as_one: bool = False
) -> list[str]:
    """What of the optimizer state of a bucket does not fit its parameters, in words.

    Args:
        params: the parameters, with the shapes that the state dict should have.
        state: descriptions by parameter and entry. A parameter without state may be absent.
        as_one: whether one flat parameter holds all of them. It has one value of each scalar and one dtype of each elementwise
            entry, so all parameters must have the same. Parameters without state count as zeros, as in torch, but only if there
            are no scalars: one `step` cannot mean "never" for one parameter and "ten times" for another.

    >>> step, moment = (Seen((), "float32"), 3.0), (Seen((4,), "float32"), None)
    >>> params = (ParamSpec("w", (4,)), ParamSpec("b", (2,)))
    >>> unfit_state(params, {"w": {"step": step, "m": moment}, "b": {"step": step, "m": moment}})
    ["'m' of 'b' has shape (4,), expected (2,)"]
    >>> unfit_state(params, {"w": {"step": step}}, as_one=True)
    ["'b' has no state and 'w' has 'step', but one flat parameter holds both"]
    """
    wrong = [
        f"{entry!r} of {spec.name!r} has shape {value.shape}, expected {spec.shape}"
        for spec in params
        for entry, (value, _) in state.get(spec.name, {}).items()
        if role_in_full(spec, value) is None
    ]
    known = [spec for spec in params if state.get(spec.name)]
    if not as_one or not known or wrong:
        return wrong
    first, entries = known[0], state[known[0].name]
    for spec in known[1:]:
        own = state[spec.name]
        if own.keys() != entries.keys():
            wrong.append(_apart(spec, quote(sorted(own)), first, quote(sorted(entries))))
            continue
        wrong += [
            _apart(spec, f"{entry!r} {_brief(own[entry])}", first, _brief(entries[entry]))
            for entry in own
            if not _can_be_one(spec, own[entry], first, entries[entry])
        ]
    scalars = [entry for entry, (value, _) in entries.items() if role_in_full(first, value) is Role.SCALAR]
    if scalars:
        wrong += [_apart(spec, "no state", first, repr(scalars[0])) for spec in params if not state.get(spec.name)]
    return wrong


def _can_be_one(a: ParamSpec, own: Description, b: ParamSpec, other: Description) -> bool:
    """Whether entries of two parameters can be one entry of the flat parameter that holds both."""
    role = role_in_full(a, own[0])
    if role is not role_in_full(b, other[0]):
        return False
    return same_value(own[1], other[1]) if role is Role.SCALAR else own[0].dtype == other[0].dtype


def _brief(entry: Description) -> str:
    value, scalar = entry
    return quote(scalar) if scalar is not None or value.shape is None else f"of {value.dtype} {value.shape}"


def _apart(spec: ParamSpec, own: str, first: ParamSpec, other: str) -> str:
    return f"{spec.name!r} has {own} and {first.name!r} has {other}, but one flat parameter holds both"


def rekeyed_groups(groups: Groups, keys: Mapping[Any, Sequence[Hashable]]) -> list[dict[str, Any]]:
    """Parameter groups under other keys, with copies of their settings.

    Args:
        groups: with a list of keys as "params".
        keys: the new keys of each old one. The key of a flat parameter has those of all parameters inside it; several old keys,
            such as aliases, may have one new key. The order of the new keys here is their order in each group, whatever it was:
            optimizers match parameters by position when they load.

    Raises:
        StateDictError: an old key that is not in `keys`, or a new key in two groups: a flat parameter has one learning rate.

    >>> rekeyed_groups([{"params": ["c", "b", "a"], "lr": 0.1}], {"a": [0], "b": [0], "c": [1]})
    [{'params': [0, 1], 'lr': 0.1}]
    """
    order = {new: at for at, new in enumerate(dict.fromkeys(new for each in keys.values() for new in each))}
    found: list[dict[str, Any]] = []
    group_of: dict[Hashable, tuple[int, Any]] = {}
    for at, group in enumerate(groups):
        if unknown := [key for key in group["params"] if key not in keys]:
            raise StateDictError(
                f"a group has {', '.join(map(quote, unknown))}, which the optimizer does not hold: expected "
                f"{quote(list(keys))}"
            )
        for key in group["params"]:
            for new in keys[key]:
                first_at, first = group_of.setdefault(new, (at, key))
                if first_at != at:
                    raise StateDictError(
                        f"{first!r} is in parameter group {first_at} and {key!r} in group {at}, but the optimizer holds both "
                        "as one parameter: put them into one group, or keep original parameters (use_orig_params=True)"
                    )
        members = {new for key in group["params"] for new in keys[key]}
        found.append(copy.deepcopy({**group, "params": sorted(members, key=order.__getitem__)}))
    return found
