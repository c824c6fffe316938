"""Loads the result of `optim_state_dict` into an optimizer, whatever the wrapping of its model (R37)."""

import copy
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from crossframe.errors import StateDictError
from crossframe.params import ParamSpec
from crossframe.shown import shown
from crossframe.state import state_key
from torch_backend.engine._unit import unit_of
from torch_backend.pieces._optimizer_state import TITLE
from torch_backend.pieces._piece_moves import from_rows, is_over, part_of_dtensor
from torch_backend.ranks._collectives import Communicator, default_process_group
from torch_backend.ranks._consensus import agree, withdraw
from torch_backend.state._optim_state_dict import Names, Owned, refuse_rank0_only
from torch_backend.state._sharded_tensors import rows_of_sharded_tensor
from torch_backend.state._state_dict import places_of


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
    """What `optimizer.load_state_dict` takes, from state under the names of parameters. All ranks call it.

    Args:
        saved: full tensors, or this rank's parts of sharded ones.
        rank0_only: the first rank of `group` alone has `saved`, of full tensors.
        by_name: the optimizer's own keys are names.
        given: see Names.

    Raises:
        StateDictError: state of parameters that the model has not, or that does not fit them; all of them are listed. Nothing has
            been changed then.
        AgreementError: ranks with other sharded state.
    """
    asked: list[dist.ProcessGroup] = []
    if rank0_only:
        ranks = Communicator(group or default_process_group())
        saved = _from_first(saved, ranks)
        asked = [ranks.group] if ranks.size > 1 else []
    if not isinstance(saved, Mapping) or not isinstance(saved.get("state"), Mapping):
        raise StateDictError(f"expected an optimizer's state dict with the key 'state', got {shown(saved)}")
    names = Names(model, optimizer, given)
    if rank0_only:
        refuse_rank0_only(names, "loaded")
    known = {key for each in names.owned for spec in each.shown for key in (spec.name, *spec.aliases)}
    known |= set(names.others.values())
    state = {_as_key(key): value for key, value in saved["state"].items()}
    groups = saved.get("param_groups")
    if groups is not None:
        groups = [{**settings, "params": [_as_key(key) for key in settings["params"]]} for settings in groups]
    asked += [each for each in _groups(names) if each not in asked]
    try:
        _check(names, known, state, groups)
    except Exception as error:
        withdraw(asked, TITLE, error)
        raise
    _agree(asked, names, state)
    # By the parameter's identity what the optimizer calls it.
    keys: dict[int, Any] = {id(param): k for k, param in enumerate(names.params)}
    if by_name:
        keys |= _own_names(names, optimizer)
    result: dict[Hashable, Any] = {}
    for each in names.owned:
        for at, own in _of_bucket(each, state).items():
            if id(each.params[at]) in keys:
                result[keys[id(each.params[at])]] = own
    # Ranks may hold the other parameters in different orders, or not all of them. So all ranks fetch all that the first rank has,
    # in its order, and keep what is theirs.
    managed = {key for each in names.owned for spec in each.shown for key in (spec.name, *spec.aliases)}
    others: dict[Any, Any] = {
        names.others[id(param)]: keys[id(param)] for param in names.params if id(param) in names.others
    }
    found_others: dict[Hashable, Any] = {}
    for key, value in state.items():
        if key not in managed:
            value = _map(value, lambda each: each.fetch(), _Remote)
            if key in others or key not in known:
                found_others[others.get(key, key)] = value
    result |= {key: found_others.pop(key) for key in others.values() if key in found_others} | found_others
    found: dict[str, Any] = {"state": result}
    if groups is not None:
        owner = {name: keys[id(param)] for param in names.params for name in names.of(param)}
        for each in names.owned:
            owner |= {alias: owner[spec.name] for spec in each.shown for alias in spec.aliases if spec.name in owner}
        found["param_groups"] = [
            copy.deepcopy({key: value for key, value in settings.items() if key != "params"})
            | {"params": sorted({owner[name] for name in settings["params"]})}
            for settings in groups
        ]
    return found


def _as_key(key: Hashable) -> Hashable:
    return state_key(key) if isinstance(key, str) else key


def _own_names(names: Names, optimizer: Optimizer | None) -> dict[int, Hashable]:
    """What an optimizer whose keys are names calls its parameters: what its own state dict calls them, or else their registered
    names."""
    found: dict[int, Hashable] = dict(names.registered)
    told = [] if optimizer is None else optimizer.state_dict()["param_groups"]
    called = [key for settings in told for key in settings["params"] if isinstance(key, str)]
    return found | {id(param): key for key, param in names.by_key(called).items()}


def _check(names: Names, known: set[str], state: Mapping[Any, Any], groups: Any) -> None:
    wrong = [
        f"{key!r} is no parameter of this model"
        for key, value in state.items()
        if key not in known and isinstance(value, Mapping)
    ]
    held = {name for param in names.params for name in names.of(param)}
    held |= {alias for each in names.owned for spec in each.shown if spec.name in held for alias in spec.aliases}
    for settings in groups or ():
        wrong += [
            f"a group has {key!r}, which the optimizer does not hold" for key in settings["params"] if key not in held
        ]
    for each in names.owned:
        for spec in each.shown:
            for entry, value in _state_of(spec, state).items():
                if isinstance(value, Tensor | _Remote) and not _is_scalar(value, spec) and value.shape != spec.shape:
                    wrong.append(f"{entry!r} of {spec.name!r} has shape {tuple(value.shape)}, expected {spec.shape}")
        if each.is_flat:
            wrong += _not_as_one(each, state)
    if wrong:
        raise StateDictError(
            f"the optimizer state does not fit, and nothing was loaded: {'; '.join(wrong)}. It is to be saved by "
            "optim_state_dict of the same model and optimizer, in whatever wrapping"
        )


def _not_as_one(each: Owned, state: Mapping[Any, Any]) -> list[str]:
    """What keeps the state of a flat parameter's members from being one."""
    states = {spec.name: own for spec in each.shown if (own := _state_of(spec, state))}
    if not states:
        return []
    first, expected = next(iter(states.items()))
    specs = {spec.name: spec for spec in each.shown}
    wrong = []
    for name, own in states.items():
        if own.keys() != expected.keys():
            wrong.append(
                f"{name!r} has {sorted(own)} and {first!r} has {sorted(expected)}, but one flat parameter holds both"
            )
            continue
        for entry, value in own.items():
            scalar = _is_scalar(value, specs[name])
            if scalar != _is_scalar(expected[entry], specs[first]) or (scalar and not _equal(value, expected[entry])):
                wrong.append(
                    f"{entry!r} of {name!r} is {shown(value)} and of {first!r} {shown(expected[entry])}, but one flat parameter "
                    "holds both"
                )
    without = [name for name in specs if name not in states]
    if without and any(_is_scalar(value, specs[first]) for value in expected.values()):
        wrong.append(f"{without} have no state and {first!r} has, but one flat parameter holds them")
    return wrong


def _state_of(spec: ParamSpec, state: Mapping[Any, Any]) -> Mapping[str, Any]:
    return next((state[name] for name in (spec.name, *spec.aliases) if name in state), {})


def _is_scalar(value: Any, spec: ParamSpec) -> bool:
    """One value for the whole parameter."""
    return not isinstance(value, Tensor | _Remote) or (math.prod(value.shape) == 1 and tuple(value.shape) != spec.shape)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and bool((a.cpu() == b.cpu()).all())
    return type(a) is type(b) and a == b


def _agree(groups: Sequence[dist.ProcessGroup], names: Names, state: Mapping[Any, Any]) -> None:
    """What is exchanged must be the same on all ranks of a shard group."""
    said: dict[Any, list[tuple[str, dict[str, str]]]] = {group: [] for group in groups}
    for each in names.owned:
        group = each.bucket.mesh.shards.group
        for spec in each.shown:
            for entry, value in _state_of(spec, state).items():
                if isinstance(value, DTensor | ShardedTensor) and group in said:
                    what = {"kind": type(value).__name__, "shape": str(tuple(value.shape)), "dtype": str(value.dtype)}
                    said[group].append((f"state {entry!r} of {spec.name!r}", what))
    for group, what in said.items():
        agree([group], TITLE, sorted(what, key=lambda each: each[0]), advice="load the same state dict on every rank")


def _groups(names: Names) -> dict[dist.ProcessGroup, None]:
    """The shard groups of all units, of more than one rank."""
    every = (each.bucket.mesh.shards for each in names.owned)
    return {shards.group: None for shards in every if shards.size > 1}


def _of_bucket(each: Owned, state: Mapping[Any, Any]) -> dict[int, dict[str, Any]]:
    """By the optimizer's parameter its state on this rank."""
    found: dict[int, dict[str, Any]] = {}
    elementwise: dict[tuple[str, torch.dtype], dict[int, Any]] = {}
    for i, spec in enumerate(each.shown):
        at = 0 if each.is_flat else i
        for entry, value in _state_of(spec, state).items():
            own = found.setdefault(at, {})
            if _is_scalar(value, spec):
                own.setdefault(entry, copy.deepcopy(value))
            else:
                own.setdefault(entry, None)
                elementwise.setdefault((entry, value.dtype), {})[i] = value
    # The entries of a state dict may have different orders on different ranks.
    for (entry, dtype), values in sorted(elementwise.items(), key=lambda item: (str(item[0][0]), str(item[0][1]))):
        buffer = _buffer_of(each, values, dtype)
        if each.is_flat:
            found[0][entry] = buffer
            continue
        parts = each.bucket.store.split(buffer)
        for i in values:
            found[i][entry] = parts[i].view(each.params[i].shape)  # of the one buffer, as the shards are
    # The optimizer steps no parameter of which nothing is here.
    return {at: own for at, own in found.items() if each.is_flat or each.params[at].numel()}


def _buffer_of(each: Owned, values: Mapping[int, Any], dtype: torch.dtype) -> Tensor:
    """Laid out like the shard: shape (padded_shard_numel,); zeros where nothing is given."""
    store, layout, shards = each.bucket.store, each.bucket.layout, each.bucket.mesh.shards
    buffer = torch.zeros_like(store.buffer, dtype=dtype)
    rows: dict[int, Tensor] = {}
    full: list[Tensor | None] = [None] * len(each.shown)
    places = places_of(each.bucket, each.wrapper._device_mesh)
    for i, value in values.items():
        local, is_rows = None, True
        if isinstance(value, ShardedTensor):
            local = rows_of_sharded_tensor(value, layout, i, store.rank)
        elif isinstance(value, DTensor):
            if is_over(value.device_mesh, places[i]):
                local, is_rows = part_of_dtensor(value, places[i])
        elif places[i].whole is None:
            local, is_rows = value.fetch() if isinstance(value, _Remote) else value, False
        if local is not None and not is_rows:
            full[i] = local
            part = store.slices(full)[i]
            if part is not None:
                store.split(buffer)[i].copy_(part)
            full[i] = None
            continue
        if local is None:
            raise StateDictError(
                f"optimizer state of {each.shown[i].name!r}: expected {layout.world_size} shards of rows on the ranks of its "
                f"unit, got a {type(value).__name__} that is cut otherwise"
            )
        rows[i] = local
    if rows:
        from_rows(rows, buffer, layout, shards, unit=unit_of(each.wrapper).name)
    return buffer


class _Remote:
    """A tensor that the first rank has. All ranks fetch it, in one order."""

    def __init__(self, value: Tensor, ranks: Communicator) -> None:
        self.shape, self.dtype = value.shape, value.dtype
        self._value, self._ranks = value, ranks

    def fetch(self) -> Tensor:
        """The tensor, by a broadcast."""
        kinds = self._ranks.group._device_types
        device = next((kind for kind in kinds if kind.type == "cpu"), kinds[0])
        here = self._value if self._value.device.type != "meta" else torch.empty_like(self._value, device=device)
        value = here.to(device).contiguous()
        self._ranks.broadcast([value])
        return value


def _from_first(saved: Any, ranks: Communicator) -> Any:
    """The first rank's state on all ranks: single values at once, other tensors when they are fetched, one by one."""
    skeleton = _map(saved, lambda value: value if value.numel() == 1 else value.to("meta")) if ranks.rank == 0 else None
    skeleton = ranks.broadcast_object(skeleton)
    if not isinstance(skeleton, Mapping) or not isinstance(skeleton.get("state"), Mapping):
        return skeleton
    source = saved if ranks.rank == 0 else skeleton
    remote = _map(source["state"], lambda value: value if value.numel() == 1 else _Remote(value, ranks))
    return {**skeleton, "state": remote}


def _map(value: Any, fn: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """The same mappings with `fn` of each value of that kind in them."""
    if isinstance(value, Mapping):
        return {key: _map(each, fn, kind) for key, each in value.items()}
    return fn(value) if isinstance(value, kind) else value
