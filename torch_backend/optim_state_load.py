"""Loading what `optim_state_dict` saved into the optimizer of any wrapping (R37)."""

import copy
import math
from collections.abc import Hashable, Mapping
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
from torch_backend.collectives import Communicator, default_process_group
from torch_backend.optim_state_dict import Names, Owned
from torch_backend.piece_moves import from_rows, is_over, rows_of_dtensor
from torch_backend.rounds import agree, withdraw
from torch_backend.sharded_tensors import rows_of_sharded_tensor
from torch_backend.state_dict import places_of
from torch_backend.unit import unit_of

TITLE = "loading of optimizer state"


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
    if rank0_only:
        saved = _from_first(saved, group)
    if not isinstance(saved, Mapping) or not isinstance(saved.get("state"), Mapping):
        raise StateDictError(f"expected an optimizer's state dict with the key 'state', got {shown(saved)}")
    names = Names(model, optimizer, given)
    known = {key for each in names.owned for spec in each.specs for key in (spec.name, *spec.aliases)}
    known |= set(names.others.values())
    state = saved["state"]
    groups = saved.get("param_groups")
    try:
        _check(names, known, state, groups)
    except StateDictError as error:
        withdraw(list(_groups(names)), TITLE, error)
        raise
    _agree(names, state)
    result: dict[Hashable, Any] = {}
    keys = {id(param): k for k, param in enumerate(names.params)}
    for each in names.owned:
        for at, own in _of_bucket(each, state).items():
            param = each.params[at]
            if id(param) in keys:
                key = each.specs[at].name if by_name and not each.is_flat else keys[id(param)]
                result[key] = own
    for param in names.params:
        name = names.others.get(id(param))
        if name in state:
            result[name if by_name else keys[id(param)]] = {
                entry: value.fetch() if isinstance(value, _Remote) else value for entry, value in state[name].items()
            }
    result |= {key: value for key, value in state.items() if key not in known}
    found: dict[str, Any] = {"state": result}
    if groups is not None:
        owner = {name: keys[id(param)] for param in names.params for name in names.of(param)}
        for each in names.owned:
            owner |= {alias: owner[spec.name] for spec in each.specs for alias in spec.aliases if spec.name in owner}
        found["param_groups"] = [
            copy.deepcopy({key: value for key, value in settings.items() if key != "params"})
            | {"params": list(settings["params"]) if by_name else sorted({owner[name] for name in settings["params"]})}
            for settings in groups
        ]
    return found


def _check(names: Names, known: set[str], state: Mapping[Any, Any], groups: Any) -> None:
    wrong = [
        f"{key!r} is no parameter of this model"
        for key, value in state.items()
        if key not in known and isinstance(value, Mapping)
    ]
    held = {name for param in names.params for name in names.of(param)}
    held |= {alias for each in names.owned for spec in each.specs if spec.name in held for alias in spec.aliases}
    for settings in groups or ():
        wrong += [
            f"a group has {key!r}, which the optimizer does not hold" for key in settings["params"] if key not in held
        ]
    for each in names.owned:
        for spec in each.specs:
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
    states = {spec.name: own for spec in each.specs if (own := _state_of(spec, state))}
    if not states:
        return []
    first, expected = next(iter(states.items()))
    specs = {spec.name: spec for spec in each.specs}
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


def _agree(names: Names, state: Mapping[Any, Any]) -> None:
    """What is exchanged must be the same on all ranks of a shard group."""
    said: dict[Any, list[tuple[str, dict[str, str]]]] = {group: [] for group in _groups(names)}
    for each in names.owned:
        group = each.bucket.mesh.shards.group
        for spec in each.specs:
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
    for i, spec in enumerate(each.specs):
        at = 0 if each.is_flat else i
        for entry, value in _state_of(spec, state).items():
            own = found.setdefault(at, {})
            if _is_scalar(value, spec):
                own.setdefault(entry, copy.deepcopy(value))
            else:
                own.setdefault(entry, None)
                elementwise.setdefault((entry, value.dtype), {})[i] = value
    for (entry, dtype), values in elementwise.items():
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
    full: list[Tensor | None] = [None] * len(each.specs)
    place = places_of(each.bucket, each.wrapper._device_mesh)[0]
    for i, value in values.items():
        if isinstance(value, ShardedTensor):
            local = rows_of_sharded_tensor(value, layout, i, store.rank)
        elif isinstance(value, DTensor):
            local = rows_of_dtensor(value) if is_over(value.device_mesh, place) else None
        else:
            full[i] = value.fetch() if isinstance(value, _Remote) else value
            part = store.slices(full)[i]
            if part is not None:
                store.split(buffer)[i].copy_(part)
            full[i] = None
            continue
        if local is None:
            raise StateDictError(
                f"optimizer state of {each.specs[i].name!r}: expected {layout.world_size} shards of rows on the ranks of its "
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


def _from_first(saved: Any, group: dist.ProcessGroup | None) -> Any:
    """The first rank's state on all ranks: tensors come when they are asked for, one by one."""
    ranks = Communicator(group or default_process_group())
    skeleton = _map(saved, lambda value: value.to("meta") if value.dim() else value) if ranks.rank == 0 else None
    skeleton = ranks.broadcast_object(skeleton)
    if not isinstance(skeleton, Mapping) or not isinstance(skeleton.get("state"), Mapping):
        return skeleton
    source = saved if ranks.rank == 0 else skeleton
    return {**skeleton, "state": _map(source["state"], lambda value: _Remote(value, ranks) if value.dim() else value)}


def _map(value: Any, fn: Any) -> Any:
    """The same mappings with `fn` of each tensor in them."""
    if isinstance(value, Mapping):
        return {key: _map(each, fn) for key, each in value.items()}
    return fn(value) if isinstance(value, Tensor) else value
