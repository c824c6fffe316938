"""Optimizer state dicts of FSDP1 (R37): by parameter name, full or sharded.

The optimizer holds a unit's flat parameter, or this rank's pieces of its original parameters. In both cases elementwise state has
the layout of the unit's shard and moves by the same copies; a scalar (`step`) stays one value. Names are those of the model
without wrappers, so that the state loads into any other wrapping.
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
from torch.optim import Optimizer

from crossframe.api import Api
from crossframe.errors import StateDictError, UnsupportedError, UsageError
from crossframe.params import ParamSpec
from crossframe.quoting import quote
from crossframe.state import Role, StateKind, rekeyed_groups, state_key
from torch_backend.compat._dtypes import from_numpy, torch_dtype
from torch_backend.engine._unit import unit_of
from torch_backend.engine._unit_tree import named_units
from torch_backend.pieces._piece_moves import as_sharded
from torch_backend.state._optimized_bucket import Descriptions, OptimizedBucket, StateOf, gather_descriptions
from torch_backend.state._state_dict import (
    HasStateDicts,
    check_use_dtensor,
    full_values,
    gathered_memory,
    kind_of,
    locations_of,
)

State = dict[str, dict[str, Any]]
# One entry of elementwise state on this rank: the flat parameter's, or pieces of original parameters by index.
Own = Tensor | Mapping[int, Tensor]


@dataclass(frozen=True, eq=False)
class Owned(OptimizedBucket):
    """A bucket of FSDP1, with the outermost wrapper of its unit."""

    wrapper: HasStateDicts

    @functools.cached_property
    def shown(self) -> tuple[ParamSpec, ...]:
        """The parameters with the shapes that a state dict shows: under tensor parallelism those of the DTensors."""
        tp_params = self.bucket.registrar.tp_params or [None] * len(self.specs)
        return tuple(
            spec if tp_param is None else replace(spec, shape=tp_param.shape)
            for spec, tp_param in zip(self.specs, tp_params, strict=True)
        )


def owned_by(model: nn.Module) -> list[Owned]:
    """All buckets below a model, in the order of its modules.

    Raises:
        UsageError: there are none, or wrappers differ in `use_orig_params`.
    """
    named = named_units(model, Api.FSDP1)
    found = [
        Owned(each.bucket, each.layout, each.bucket.registrar.managed(), unit.modules[0])  # type: ignore[arg-type]
        for unit in named
        for each in unit.buckets
    ]
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
        """The names of the model's parameters in one parameter of the optimizer: several for a flat parameter.

        Raises:
            UsageError: it is not in the model.
        """
        if id(param) in self._place:
            each, at = self._place[id(param)]
            return [each.specs[i].name for i in each.members(at)]
        if id(param) not in self.unmanaged:
            raise UsageError(
                f"the optimizer holds a parameter of shape {tuple(param.shape)} that is not in the model: build it with "
                "model.parameters() after wrapping the model, and pass the same model"
            )
        return [self.unmanaged[id(param)]]

    def by_key(self, keys: Iterable[Any]) -> dict[Any, nn.Parameter]:
        """The parameters of an optimizer's keys: their locations in it, or their names, as registered or without wrappers."""
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
        """The keys of the optimizer's parameters, by the parameter's identity, in the optimizer's order.

        Args:
            named: an optimizer whose keys are names: those in its own state dict, or else the registered ones.
        """
        if named is None:
            return {id(param): location for location, param in enumerate(self.params)}
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
    """An optimizer's state by the names of parameters. All ranks call it.

    Args:
        raw: the result of `optimizer.state_dict()`.
        full: full tensors, or sharded ones.
        rank0_only: with `full`, only the first rank of `group` gets state, the others an empty dict.
        offload: to the CPU.
        given: see Names.

    Raises:
        StateDictError: an entry that is neither elementwise nor a scalar, or a scalar that differs between ranks.
    """
    names = Names(model, optimizer, given)
    if full and rank0_only:
        refuse_rank0_only(names, "saved")
    keys = names.by_key(raw["state"])
    states = {id(param): raw["state"][key] for key, param in keys.items()}
    kept = not (full and rank0_only) or dist.get_rank(group) == 0
    state: State = {}
    everywhere = list(zip(names.owned, gather_descriptions(names.owned, states), strict=True))
    # The largest first: the memory that a bucket needs on the way adds to the results of those before it.
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
    """Raise UnsupportedError for state under tensor parallelism, since no single rank holds all of it."""
    if any(each.bucket.registrar.tp_params for each in names.owned):
        raise UnsupportedError(
            f"optimizer state of tensor parallel parameters is {what} on every rank, each with its own parts of DTensors; use "
            "rank0_only=False"
        )


def _of_bucket(
    each: Owned, by_rank: Sequence[Descriptions], states: StateOf, *, full: bool, kept: bool, offload: bool
) -> State:
    """The state of a bucket's parameters, by name."""
    state: State = {spec.name: {} for spec in each.specs}
    elementwise: dict[tuple[str, str], list[int]] = {}
    for at, entries in enumerate(each.entries(by_rank)):
        for entry, (role, seen, value) in entries.items():
            for i in each.members(at):
                # In the optimizer's order: a tensor of elementwise state follows.
                state[each.specs[i].name][entry] = copied(value) if role is Role.SCALAR else None
            if role is Role.ELEMENTWISE:
                elementwise.setdefault((entry, seen.dtype), []).extend(each.members(at))
    for (entry, dtype), indices in elementwise.items():
        as_full = full or kind_of(each.wrapper) is StateKind.FULL
        pieces = {} if each.is_flat else each.pieces(entry, states)
        own = states[id(each.params[0])][entry] if each.is_flat else {i: pieces[i] for i in indices if i in pieces}
        if as_full:
            shown = _whole(each, own, torch_dtype(dtype), indices, kept=kept, offload=offload)
        else:
            shown = _rows(each, own, torch_dtype(dtype), indices, offload=offload)
        for i, value in zip(indices, shown, strict=False):  # nothing is shown on a rank that keeps nothing
            state[each.specs[i].name][entry] = value
    return {name: entries for name, entries in state.items() if entries}


def copied(value: Any) -> Any:
    """A scalar that ranks exchanged, in the form that the optimizer stores."""
    return from_numpy(value).clone() if isinstance(value, np.ndarray) else value


def _whole(
    each: Owned, own: Own, dtype: torch.dtype, indices: Sequence[int], *, kept: bool, offload: bool
) -> Sequence[Tensor]:
    """Full tensors of elementwise state; none unless `kept`."""
    gathered, part = gathered_memory(each.bucket, dtype)
    line, unit = _line(each, own, part), unit_of(each.wrapper).name
    return full_values(each.bucket, line, gathered, indices, kept=kept, offload=offload, unit=unit)


def _rows(each: Owned, own: Own, dtype: torch.dtype, indices: Sequence[int], *, offload: bool) -> Sequence[Tensor]:
    """A sharded state dict's tensors of elementwise state."""
    wrapper, bucket, unit = each.wrapper, each.bucket, unit_of(each.wrapper).name
    check_use_dtensor(wrapper, wrapper._state_dict_settings.optim_state_dict_config, unit)
    locations = locations_of(bucket, wrapper._device_mesh)
    line = _line(each, own, torch.empty_like(bucket.store.buffer, dtype=dtype))
    rows = as_sharded([locations[i] for i in indices], line.to(bucket.device), unit=unit)
    return [value.cpu() for value in rows] if offload else rows


def _line(each: Owned, own: Own, memory: Tensor) -> Tensor:
    """One entry of elementwise state, laid out like the shard: the flat parameter's own, or its pieces joined in `memory`."""
    return own.detach().reshape(-1) if isinstance(own, Tensor) else each.bucket.store.join(own, memory)


# Keys


def rekey(state_dict: Mapping[str, Any], names: Names, *, to_names: bool) -> dict[str, Any]:
    """The same state with names as keys instead of positions, or the reverse. Flat parameters have no names."""
    keys = [*state_dict["state"], *(key for group in state_dict["param_groups"] for key in group["params"])]
    kinds = {type(key) for key in keys}
    if len(kinds - {int, str}) or len(kinds) > 1:
        raise StateDictError(f"expected names as the keys of an optimizer's state, or positions, got {quote(keys)}")
    if kinds == {str if to_names else int}:
        return dict(state_dict)
    called = []
    for param in names.params:
        own = names.of(param)
        if len(own) > 1:
            raise StateDictError(
                f"the optimizer holds {own} as one flat parameter, which has no name: use optim_state_dict and "
                "optim_state_dict_to_load, or use_orig_params=True"
            )
        called += own
    table: dict[Any, Any] = dict(enumerate(called)) if to_names else {name: i for i, name in enumerate(called)}
    table |= {key: table[state_key(key)] for key in keys if isinstance(key, str) and state_key(key) in table}
    if unknown := sorted({quote(key) for key in keys if key not in table}):
        raise StateDictError(
            f"no parameter of this optimizer is called {', '.join(unknown)}: expected {quote(sorted(table))}"
        )
    new = {key: (other,) for key, other in sorted(table.items(), key=lambda item: item[1])}
    groups = rekeyed_groups(state_dict["param_groups"], new)
    return {"state": {table[key]: value for key, value in state_dict["state"].items()}, "param_groups": groups}
