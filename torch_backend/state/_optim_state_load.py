"""Loads the result of `optim_state_dict` into an optimizer, whatever the wrapping of its model (R37).

[Note: names and keys] State dicts and optimizers name parameters in three ways: a state dict by any of the names of a parameter,
with or without wrappers; the model by the first of its names; the optimizer by keys, which are positions or names of its own, and
of which a flat parameter has one for all parameters inside it. `to_load` therefore converts twice and no more: names to first
names before anything else, and first names to keys when everything is known to fit.
"""

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from crossframe.errors import StateDictError
from crossframe.quoting import quote
from crossframe.state import Description, Role, rekeyed_groups, role_in_full, unfit_state
from torch_backend.compat._dtypes import torch_dtype
from torch_backend.engine._unit import unit_of
from torch_backend.pieces._fill_from_state_dict import fill
from torch_backend.pieces._optimizer_state import TITLE
from torch_backend.ranks._collectives import Communicator, default_process_group
from torch_backend.ranks._consensus import agree, withdraw
from torch_backend.state._optim_state_dict import Names, Owned, refuse_rank0_only
from torch_backend.state._optimized_bucket import describe
from torch_backend.state._state_dict import locations_of


def to_load(
    model: nn.Module,
    optimizer: Optimizer | None,
    saved: Any,
    *,
    rank0_only: bool,
    group: dist.ProcessGroup | None,
    by_name: bool = False,
    given: Any = None,
) -> dict[str, Any]:
    """The argument of `optimizer.load_state_dict`, from state under the names of parameters. All ranks call it.

    Args:
        saved: full tensors, or this rank's parts of sharded ones.
        rank0_only: only the first rank of `group` has `saved`, of full tensors.
        by_name: the optimizer's own keys are names.
        given: see Names.

    Raises:
        StateDictError: the state is of parameters that the model does not have, or does not fit them; all of them are listed.
            Nothing has been changed.
        AgreementError: other ranks have other sharded state.
    """
    source = Communicator(group or default_process_group()) if rank0_only else None
    if source is not None:
        saved = _skeleton(saved, source)
    if not isinstance(saved, Mapping) or not isinstance(saved.get("state"), Mapping):
        raise StateDictError(f"expected an optimizer's state dict with the key 'state', got {quote(saved)}")
    names = Names(model, optimizer, given)
    if source is not None:
        refuse_rank0_only(names, "loaded")
    keys = names.keys(optimizer if by_name else None)
    key_of: dict[Hashable, Hashable] = {name: keys[id(param)] for param in names.params for name in names.of(param)}
    state: dict[Hashable, Any] = {}
    for name, value in saved["state"].items():
        state.setdefault(names.first(name), value)
    exchanging = _groups(names, source)
    try:
        described = _checked(names, state)
        groups = _groups_to_load(names, key_of, saved.get("param_groups"))
    except Exception as error:
        withdraw(exchanging, TITLE, error)
        raise
    _agree(exchanging, names, state, described)

    found: dict[Hashable, Any] = {}
    for each in names.owned:
        own = _of_bucket(each, state, described, source)
        found |= {keys[id(param)]: own[at] for at, param in enumerate(each.params) if at in own and id(param) in keys}
    managed = {spec.name for each in names.owned for spec in each.specs}
    # In the order of the state dict, which is the first rank's: ranks may hold parameters in other orders, and fetch together.
    for name, value in state.items():
        if name not in managed:
            value = _fetched(value, source)
            if name in key_of or name not in names:  # what is of no parameter is loaded as it is
                found[key_of.get(name, name)] = value
    ordered = {key: found[key] for key in (*keys.values(), *found) if key in found}
    return {"state": ordered} if groups is None else {"state": ordered, "param_groups": groups}


# The state in units, by the first name of the parameter and by entry.
_Described = Mapping[str, Mapping[str, Description]]


def _checked(names: Names, state: Mapping[Any, Any]) -> _Described:
    """The descriptions of the state of parameters in units.

    Raises:
        StateDictError: the state does not fit.
    """
    # Values that are not mappings may be beside the state of parameters.
    is_state = {name: isinstance(value, Mapping) for name, value in state.items()}
    wrong = [f"{name!r} is no parameter of this model" for name in state if is_state[name] and name not in names]
    wrong += [f"{name!r}: expected values by entry" for name in state if name in names and not is_state[name]]
    found = {
        spec.name: {entry: describe(value) for entry, value in state[spec.name].items()}
        for each in names.owned
        for spec in each.shown
        if is_state.get(spec.name)
    }
    for each in names.owned:
        wrong += unfit_state(each.shown, found, as_one=each.is_flat)
    if wrong:
        raise StateDictError(
            f"the optimizer state does not fit, and nothing was loaded: {'; '.join(wrong)}. It must come from "
            "optim_state_dict of the same model and optimizer, in any wrapping"
        )
    return found


def _groups_to_load(names: Names, key_of: Mapping[Hashable, Hashable], groups: Any) -> list[dict[str, Any]] | None:
    """Parameter groups under the optimizer's keys, in the order of its own state dict: by position or in alphabetical order."""
    if groups is None:
        return None
    named = [{**settings, "params": [names.first(name) for name in settings["params"]]} for settings in groups]
    in_order = sorted(key_of.items(), key=lambda item: item[1])  # type: ignore[arg-type, return-value]
    return rekeyed_groups(named, {name: (key,) for name, key in in_order})


def _agree(groups: Sequence[dist.ProcessGroup], names: Names, state: Mapping[Any, Any], described: _Described) -> None:
    """Raise AgreementError unless all ranks of a shard group exchange the same entries."""
    descriptions: dict[Any, list[tuple[str, dict[str, str]]]] = {group: [] for group in groups}
    for each in names.owned:
        group = each.bucket.mesh.shards.group
        for spec in each.shown:
            for entry, (seen, _) in described.get(spec.name, {}).items():
                value = state[spec.name][entry]
                if isinstance(value, DTensor | ShardedTensor) and group in descriptions:
                    what = {"kind": type(value).__name__, "shape": str(seen.shape), "dtype": seen.dtype}
                    descriptions[group].append((f"state {entry!r} of {spec.name!r}", what))
    for group, what in descriptions.items():
        agree([group], TITLE, sorted(what, key=lambda each: each[0]), advice="load the same state dict on every rank")


def _groups(names: Names, source: Communicator | None) -> list[dist.ProcessGroup]:
    """The groups of more than one rank that exchange state: that of `source`, and the shard groups of all units."""
    every = ([source] if source is not None else []) + [each.bucket.mesh.shards for each in names.owned]
    return list(dict.fromkeys(ranks.group for ranks in every if ranks.size > 1))


def _of_bucket(
    each: Owned, state: Mapping[Any, Any], described: _Described, source: Communicator | None
) -> dict[int, dict[str, Any]]:
    """This rank's optimizer state of a bucket's parameters, by their index in the optimizer."""
    found: dict[int, dict[str, Any]] = {}
    elementwise: dict[tuple[str, str], dict[int, Any]] = {}
    for i, spec in enumerate(each.shown):
        for entry, (seen, _) in described.get(spec.name, {}).items():
            own, value = found.setdefault(0 if each.is_flat else i, {}), state[spec.name][entry]
            if role_in_full(spec, seen) is Role.SCALAR:
                own.setdefault(entry, copy.deepcopy(value))
            else:
                own.setdefault(entry, None)
                elementwise.setdefault((entry, seen.dtype), {})[i] = value
    # The entries of a state dict may have different orders on different ranks.
    for (entry, dtype), values in sorted(elementwise.items(), key=lambda item: (str(item[0][0]), item[0][1])):
        line = _line_of(each, values, torch_dtype(dtype), source)
        if each.is_flat:
            found[0][entry] = line
            continue
        parts = each.bucket.store.split(line)
        for i in values:
            found[i][entry] = parts[i].view(each.params[i].shape)  # of the one line, as the shards are
    # The optimizer steps no parameter without elements on this rank.
    return {at: own for at, own in found.items() if each.is_flat or each.params[at].numel()}


def _line_of(each: Owned, values: Mapping[int, Any], dtype: torch.dtype, source: Communicator | None) -> Tensor:
    """One entry of elementwise state, laid out like the shard: shape (padded_shard_numel,); zeros where no value is given.

    Args:
        values: by index of the parameter.
    """
    line, locations = (
        torch.zeros_like(each.bucket.store.buffer, dtype=dtype),
        locations_of(each.bucket, each.wrapper._device_mesh),
    )
    given = ((each.specs[i].name, locations[i], _fetched(value, source)) for i, value in values.items())
    fill(line, each.bucket.store, given, unit=unit_of(each.wrapper).name)
    return line


def _skeleton(saved: Any, source: Communicator) -> Any:
    """The first rank's state dict on all ranks: single values at once, other tensors on other ranks as meta tensors, which
    `_fetched` fills one by one."""
    here = source.rank == 0
    sent = _map(saved, lambda value: value if value.numel() == 1 else value.to("meta")) if here else None
    sent = source.broadcast_object(sent)
    return saved if here else sent


def _fetched(value: Any, source: Communicator | None) -> Any:
    """A value, with all tensors in it, that the first rank of `source` has. All ranks call it, in one order."""
    if source is None:
        return value
    kinds = source.group._device_types
    device = next((kind for kind in kinds if kind.type == "cpu"), kinds[0])

    def fetch(value: Tensor) -> Tensor:
        if value.numel() == 1:
            return value
        value = torch.empty_like(value, device=device) if value.is_meta else value.to(device).contiguous()
        source.broadcast([value])
        return value

    return _map(value, fetch)


def _map(value: Any, fn: Callable[[Tensor], Any]) -> Any:
    """The same mappings with `fn` of each tensor in them."""
    if isinstance(value, Mapping):
        return {key: _map(each, fn) for key, each in value.items()}
    return fn(value) if isinstance(value, Tensor) else value
