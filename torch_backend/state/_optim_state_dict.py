"""Optimizer state dicts of FSDP1 (R37): by parameter name, full or sharded.

The optimizer holds a unit's flat parameter, or this rank's pieces of its original ones. Either way its elementwise state is laid
out like the unit's shard, so it is gathered, or cut into rows, as the shard is; what is one value for a whole parameter
(`step`) stays one value. The names in it are those of the model without wrappers, so that it loads into any other wrapping.
"""

import functools
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from crossframe.errors import StateDictError, UnsupportedError, UsageError
from crossframe.faces import Face
from crossframe.params import ParamSpec
from crossframe.shown import shown
from crossframe.state import (
    Described,
    Role,
    Seen,
    StateKind,
    agreed,
    classify,
    rekeyed_groups,
    state_key,
)
from torch_backend.compat._dtypes import dtype_name, from_numpy, to_numpy, torch_dtype
from torch_backend.engine._bucket import Bucket
from torch_backend.engine._unit import unit_of
from torch_backend.engine._unit_tree import named_units
from torch_backend.memory._gather import views_of
from torch_backend.pieces._piece_moves import PHASE
from torch_backend.registration import FlatRegistrar
from torch_backend.state._state_dict import HasStateDicts, as_rows, kind_of, places_of

State = dict[str, dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Owned:
    """A bucket, for its optimizer.

    Attributes:
        params: what the optimizer holds of it, as a rule.
        specs: its parameters, under their names in the model that the state dict is of.
    """

    wrapper: HasStateDicts
    bucket: Bucket
    specs: tuple[ParamSpec, ...]

    @functools.cached_property
    def shown(self) -> tuple[ParamSpec, ...]:
        """The parameters with the shapes that a state dict shows: under tensor parallelism those of the DTensors."""
        wholes = self.bucket.registrar.wholes
        if not wholes:
            return self.specs
        return tuple(
            spec if whole is None else replace(spec, shape=whole.shape)
            for spec, whole in zip(self.specs, wholes, strict=True)
        )

    @property
    def is_flat(self) -> bool:
        """Whether one flat parameter stands for all."""
        return isinstance(self.bucket.registrar, FlatRegistrar)

    @property
    def params(self) -> list[nn.Parameter]:
        return self.bucket.registrar.managed()

    def members(self, at: int) -> range:
        """The indices of the parameters that the optimizer's parameter `at` stands for."""
        return range(len(self.specs)) if self.is_flat else range(at, at + 1)

    def held(self, at: int) -> list[int]:
        """How many elements each rank has of the optimizer's parameter `at`."""
        layout = self.bucket.layout
        if self.is_flat:
            return [layout.padded_shard_numel] * layout.world_size
        numels = [0] * layout.world_size
        for piece in layout.find(at, 0, self.specs[at].numel):
            numels[piece.rank] += piece.numel
        return numels

    def called(self, at: int) -> str:
        """For messages."""
        return f"the flat parameter of {self.specs[0].name!r}" if self.is_flat else self.specs[at].name


def owned_by(model: nn.Module) -> list[Owned]:
    """All buckets below a model, in the order of its modules.

    Raises:
        UsageError: there are none, or wrappers that differ in `use_orig_params`.
    """
    named = named_units(model, Face.FSDP1)
    found = [Owned(unit.modules[0], each.bucket, each.params) for unit in named for each in unit.buckets]  # type: ignore[arg-type]
    if not named:
        raise UsageError(
            "there is no FullyShardedDataParallel in this model: use the optimizer's own state_dict and load_state_dict"
        )
    if len({each.is_flat for each in found}) > 1:
        raise UsageError(
            "some wrappers keep their original parameters and some do not: pass one use_orig_params to all"
        )
    return found


class Names:
    """The names of the parameters that an optimizer holds, and the keys under which it knows them.

    Attributes:
        owned: the buckets of the model's wrappers.
        params: what the optimizer holds, in its order.
        unmanaged: the first names of parameters of the model that are in no unit, by the parameter's identity.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, given: Any = None, *, maybe_plain: bool = False
    ) -> None:
        """
        Args:
            given: instead of an optimizer its parameters, or groups of them; None for all of the model's.
            maybe_plain: the model may have no wrappers.
        """
        plain = maybe_plain and not any(isinstance(module, HasStateDicts) for module in model.modules())
        self.owned = [] if plain else owned_by(model)
        self._place = {id(param): (each, at) for each in self.owned for at, param in enumerate(each.params)}
        self.unmanaged: dict[int, str] = {}
        self._registered: dict[int, str] = {}
        self._by_name: dict[str, nn.Parameter] = {}
        for name, param in model.named_parameters():
            self._registered[id(param)], self._by_name[state_key(name)] = name, param
            if id(param) not in self._place:
                self.unmanaged[id(param)] = state_key(name)
        specs = [spec for each in self.owned for spec in each.specs]
        self._first = {name: name for name in self.unmanaged.values()}
        self._first |= {name: spec.name for spec in specs for name in (spec.name, *spec.aliases)}
        self.params = _params_of(model, optimizer, given)

    def first(self, key: Hashable) -> Hashable:
        """The first name of the parameter of the model that has this name or alias, with wrappers in it or without; other keys
        without wrappers."""
        name = state_key(key) if isinstance(key, str) else key
        return self._first.get(name, name)  # type: ignore[call-overload]

    def __contains__(self, name: Hashable) -> bool:
        """Whether a parameter of the model has this name."""
        return name in self._first

    def of(self, param: nn.Parameter) -> list[str]:
        """The names that a parameter of the optimizer stands for.

        Raises:
            UsageError: it is not in the model.
        """
        if id(param) in self._place:
            each, at = self._place[id(param)]
            return [each.specs[i].name for i in each.members(at)]
        if id(param) not in self.unmanaged:
            raise UsageError(
                f"the optimizer holds a parameter of shape {tuple(param.shape)} that is not in the model: build it with "
                "model.parameters() once the model is wrapped, and pass the same model"
            )
        return [self.unmanaged[id(param)]]

    def by_key(self, keys: Iterable[Any]) -> dict[Any, nn.Parameter]:
        """The parameters of an optimizer's keys: their places in it, or their names, as registered or without wrappers."""
        named = self._by_name | {
            each.specs[i].name: p for each in self.owned for at, p in enumerate(each.params) for i in each.members(at)
        }
        found: dict[Any, nn.Parameter] = {}
        for key in keys:
            if isinstance(key, int) and key < len(self.params):
                found[key] = self.params[key]
            elif isinstance(key, str) and (name := state_key(key)) in named:
                found[key] = named[name]
        return found

    def keys(self, named: Optimizer | None = None) -> dict[int, Hashable]:
        """The keys of what the optimizer holds, by the parameter's identity, in its order.

        Args:
            named: an optimizer whose keys are names: those in its own state dict, or else the registered ones.
        """
        if named is None:
            return {id(param): place for place, param in enumerate(self.params)}
        own = (key for group in named.state_dict()["param_groups"] for key in group["params"] if isinstance(key, str))
        names = self._registered | {id(param): key for key, param in self.by_key(own).items()}
        return {id(param): names.get(id(param)) for param in self.params}


def _params_of(model: nn.Module, optimizer: Optimizer | None, given: Any) -> list[nn.Parameter]:
    groups = optimizer.param_groups if given is None and optimizer is not None else given
    if groups is None:
        return list(model.parameters())
    found: list[nn.Parameter] = []
    for each in groups:
        found += each["params"] if isinstance(each, dict) else [each]
    return found


# Saving


def save(
    model: nn.Module,
    optimizer: Optimizer | None,
    raw: Mapping[str, Any],
    *,
    full: bool,
    rank0_only: bool,
    offload: bool,
    group: dist.ProcessGroup | None,
    given: Any = None,
) -> dict[str, Any]:
    """An optimizer's state under the names of parameters. All ranks call it.

    Args:
        raw: what `optimizer.state_dict()` gave.
        full: full tensors, or sharded ones.
        rank0_only: with `full`, other ranks than the first of `group` get an empty dict.
        offload: to the CPU.
        given: see Names.

    Raises:
        StateDictError: state that is neither one value an element nor one in all, or that ranks differ in.
    """
    names = Names(model, optimizer, given)
    if full and rank0_only:
        refuse_rank0_only(names, "saved")
    keys = names.by_key(raw["state"])
    states = {id(param): raw["state"][key] for key, param in keys.items()}
    kept = not (full and rank0_only) or dist.get_rank(group) == 0
    state: State = {}
    everywhere = list(zip(names.owned, _everyones(names.owned, states), strict=True))
    # The largest first: what a bucket needs on the way comes on top of what is there of those before.
    everywhere.sort(key=lambda pair: pair[0].bucket.layout.padded_shard_numel, reverse=True)
    for each, by_rank in everywhere:
        state |= _of_bucket(each, by_rank, states, full=full, kept=kept, offload=offload)
    if not kept:
        return {}
    ordered: dict[Any, Any] = {}
    for param in names.params:
        for name in names.of(param):
            if name in state:
                ordered[name] = state[name]
            elif id(param) in states and id(param) in names.unmanaged:
                ordered[name] = dict(states[id(param)])
    for key in [key for key in raw["state"] if key not in keys]:
        warnings.warn(f"optimizer state under {key!r} belongs to no parameter: it is copied as it is", stacklevel=4)
        ordered[key] = raw["state"][key]
    result: dict[str, Any] = {"state": ordered}
    if "param_groups" in raw:
        held = names.by_key(key for group in raw["param_groups"] for key in group["params"])
        called = {key: names.of(param) for key, param in held.items()}
        result["param_groups"] = rekeyed_groups(raw["param_groups"], called)
    return result


def refuse_rank0_only(names: Names, what: str) -> None:
    """Raise UnsupportedError for state of tensor parallelism, of which no single rank has all."""
    if any(each.bucket.registrar.wholes for each in names.owned):
        raise UnsupportedError(
            f"optimizer state of tensor parallel parameters is {what} on every rank, each with its own parts of DTensors; use "
            "rank0_only=False"
        )


# What a rank's optimizer keeps of the parameters of a bucket, by their index in `Owned.params` and by entry.
_Told = dict[int, dict[str, Described]]


def _everyones(owned: Sequence[Owned], states: Mapping[int, Mapping[str, Any]]) -> list[list[_Told]]:
    """Of each bucket what every rank of its shard group has. One exchange of objects for all buckets of a group."""
    found: list[list[_Told]] = [[] for _ in owned]
    groups: dict[tuple[int, ...], list[int]] = {}
    for k, each in enumerate(owned):
        groups.setdefault(each.bucket.mesh.shards.ranks, []).append(k)
    for members in groups.values():
        said = [
            {
                at: {entry: described(value) for entry, value in states[id(param)].items()}
                for at, param in enumerate(owned[k].params)
                if id(param) in states
            }
            for k in members
        ]
        gathered = owned[members[0]].bucket.mesh.shards.gather_objects(said)
        for place, k in enumerate(members):
            found[k] = [by_rank[place] for by_rank in gathered]
    return found


def described(value: Any) -> Described:
    """The shape and dtype of a value, and the value if there is a single one, as an array if it is a tensor."""
    if not isinstance(value, Tensor):
        return Seen(None, type(value).__name__), value
    is_one = not isinstance(value, DTensor | ShardedTensor) and value.numel() == 1
    return Seen(tuple(value.shape), dtype_name(value.dtype)), to_numpy(value) if is_one else None


def _of_bucket(
    each: Owned,
    by_rank: list[_Told],
    states: Mapping[int, Mapping[str, Any]],
    *,
    full: bool,
    kept: bool,
    offload: bool,
) -> State:
    state: State = {spec.name: {} for spec in each.specs}
    elementwise: dict[tuple[str, str], list[int]] = {}
    for at in range(len(each.params)):
        for entry in dict.fromkeys(entry for told in by_rank for entry in told.get(at, {})):
            told = {rank: told[at][entry] for rank, told in enumerate(by_rank) if entry in told.get(at, {})}
            held = each.held(at)
            by_place = [told[rank][0] if rank in told else None for rank in range(len(by_rank))]
            if classify(each.called(at), entry, by_place, held) is Role.ELEMENTWISE:
                elementwise.setdefault((entry, next(iter(told.values()))[0].dtype), []).append(at)
                for i in each.members(at):
                    state[each.specs[i].name][entry] = None  # in the optimizer's order; the tensor follows
                continue
            value = agreed(each.called(at), entry, {rank: value for rank, (_, value) in told.items()}, held)
            for i in each.members(at):
                state[each.specs[i].name][entry] = from_numpy(value).clone() if isinstance(value, np.ndarray) else value
    for (entry, dtype), places in elementwise.items():
        values = _laid_out(each, entry, places, states, torch_dtype(dtype))
        indices = [i for at in places for i in each.members(at)]
        if full or kind_of(each.wrapper) is StateKind.FULL:
            shown = _whole(each, values, indices, kept=kept, offload=offload)
        else:
            shown = _rows(each, values, indices, offload=offload)
        for i, value in zip(indices, shown, strict=True):
            state[each.specs[i].name][entry] = value
    return {name: entries for name, entries in state.items() if entries}


def _laid_out(
    each: Owned, entry: str, places: Sequence[int], states: Mapping[int, Mapping[str, Any]], dtype: torch.dtype
) -> Tensor:
    """One entry of the state, laid out like the shard: shape (padded_shard_numel,); zeros where a parameter has none."""
    store = each.bucket.store
    if each.is_flat:
        return states[id(each.params[0])][entry].detach().reshape(-1)
    values = torch.zeros_like(store.buffer, dtype=dtype)
    parts = store.split(values)
    for at in places:
        own = states.get(id(each.params[at]), {}).get(entry)
        if own is not None:
            parts[at].copy_(own.detach().reshape(-1))
    return values


def _whole(each: Owned, values: Tensor, indices: list[int], *, kept: bool, offload: bool) -> Sequence[Tensor | None]:
    """Full tensors, from what is laid out like the shard; where they are not `kept`, None."""
    bucket, name = each.bucket, unit_of(each.wrapper).name
    layout, shards = bucket.layout, bucket.mesh.shards
    device = torch.device("cpu") if offload else bucket.device
    if each.is_flat:
        # Views of what was gathered, as in torch: copies would hold as much again while they are made.
        values = values.to(bucket.device)
        gathered = values.new_empty(layout.padded_shard_numel * layout.world_size)
        shards.all_gather(gathered, values, unit=name, phase=PHASE).wait()
        views = views_of(layout, gathered)
        return [_shown(bucket, i, views[i].to(device)) if kept else None for i in indices]
    with bucket.gathered(values, name) as whole:
        if layout.world_size > 1:
            values.untyped_storage().resize_(0)  # it has been sent, and no one else has it
        return [_shown(bucket, i, whole[i].to(device, copy=True)) if kept else None for i in indices]


def _shown(bucket: Bucket, i: int, value: Tensor) -> Tensor:
    """A full value of a parameter's state, under tensor parallelism as a DTensor."""
    whole = bucket.registrar.wholes[i] if bucket.registrar.wholes else None
    return value if whole is None else whole.dtensor(value)


def _rows(each: Owned, values: Tensor, indices: list[int], *, offload: bool) -> Sequence[Tensor]:
    """A sharded state dict's tensors, from what is laid out like the shard."""
    bucket, config = each.bucket, each.wrapper._state_dict_settings.optim_state_dict_config
    places = places_of(bucket, each.wrapper._device_mesh)
    use_dtensor = getattr(config, "_use_dtensor", False)
    rows = as_rows(
        bucket, values, [places[i] for i in indices], use_dtensor=use_dtensor, unit=unit_of(each.wrapper).name
    )
    return [value.cpu() for value in rows] if offload else rows


# Keys


def rekey(state_dict: Mapping[str, Any], names: Names, *, to_names: bool) -> dict[str, Any]:
    """The same state under the other kind of key. Of parameters that are flat there is no other key."""
    keys = [*state_dict["state"], *(key for group in state_dict["param_groups"] for key in group["params"])]
    kinds = {type(key) for key in keys}
    if len(kinds - {int, str}) or len(kinds) > 1:
        raise StateDictError(f"expected names as the keys of an optimizer's state, or places, got {shown(keys)}")
    if kinds == {str if to_names else int}:
        return dict(state_dict)
    called = []
    for param in names.params:
        own = names.of(param)
        if len(own) > 1:
            raise StateDictError(
                f"the optimizer holds {own} as one flat parameter, which has no name of its own: use optim_state_dict and "
                "optim_state_dict_to_load, or use_orig_params=True"
            )
        called += own
    table: dict[Any, Any] = dict(enumerate(called)) if to_names else {name: i for i, name in enumerate(called)}
    table |= {key: table[state_key(key)] for key in keys if isinstance(key, str) and state_key(key) in table}
    if unknown := sorted({shown(key) for key in keys if key not in table}):
        raise StateDictError(
            f"no parameter of this optimizer is called {', '.join(unknown)}: expected {shown(sorted(table))}"
        )
    new = {key: (other,) for key, other in sorted(table.items(), key=lambda item: item[1])}
    groups = rekeyed_groups(state_dict["param_groups"], new)
    return {"state": {table[key]: value for key, value in state_dict["state"].items()}, "param_groups": groups}
