"""Optimizer state of PieceTensors: DTensors in state dicts, PieceTensors inside (R37).

An optimizer gets the hooks for this at its first step, before which it has no state. What was loaded before is taken over then.
"""

import weakref
from collections.abc import Hashable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from crossframe.errors import StateDictError
from torch_backend.pieces._piece_moves import from_dtensors
from torch_backend.pieces._piece_tensor import PieceTensor, dtensors_of, piece_tensor
from torch_backend.ranks._consensus import agree, withdraw

TITLE = "loading of optimizer state"


# State by parameter (or what stands for it) and by its name in the optimizer.
State = Mapping[Any, Mapping[Hashable, Any]]

# What one collective moves: the entries of one bucket, name and dtype. Sorted, the order of collectives is the same on all ranks,
# even if their optimizers hold the parameters in different orders.
_GroupKey = tuple[str, str, str, int]

_hooked: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


def as_dtensors(state: State) -> dict[Any, dict[Hashable, Any]]:
    """State with DTensors in the place of PieceTensors. One all-to-all for each bucket, name and dtype; all ranks call it."""
    result = {key: dict(values) for key, values in state.items()}
    groups: dict[_GroupKey, list[tuple[Any, Hashable, PieceTensor]]] = {}
    for key, values in result.items():
        for name, value in values.items():
            if isinstance(value, PieceTensor):
                groups.setdefault(_group_key(value, name, value), []).append((key, name, value))
    for _, members in _in_one_order(groups):
        for (key, name, _), dtensor in zip(members, dtensors_of([value for _, _, value in members]), strict=True):
            result[key][name] = dtensor
    return result


def as_pieces(state: State, params: Mapping[Any, Any]) -> dict[Any, dict[Hashable, Any]]:
    """The inverse: what has its parameter's shape becomes a PieceTensor, of a DTensor or of a full tensor. All ranks call it.

    Args:
        state: under the keys of `params`.
        params: the parameters, in any order. State of those that are not PieceTensors stays as it is.

    Raises:
        StateDictError: a DTensor on another mesh.
        AgreementError: ranks were given other entries. Like the error above, all ranks raise it and nothing has been taken.
    """
    result = {key: dict(values) for key, values in state.items()}
    groups_of = {param.place.shards.ranks: param.place.shards.group for param in params.values() if _is_piece(param)}
    shards = [groups_of[ranks] for ranks in sorted(groups_of)]
    found = list(_entries(result, params))
    try:
        for _, param, name, value in found:
            if isinstance(value, DTensor) and value.device_mesh != param.device_mesh:
                raise StateDictError(
                    f"parameter {param.place.name!r}: its state {name!r} is on {value.device_mesh}, expected "
                    f"{param.device_mesh}, the mesh of its module, or a full tensor"
                )
    except StateDictError as error:
        withdraw(shards, TITLE, error)
        raise
    said = [(f"state {name!r} of {param.place.name!r}", _described(value)) for _, param, name, value in found]
    for group in shards:
        agree([group], TITLE, said, advice="load the same state dict on every rank")
    groups: dict[_GroupKey, list[tuple[Any, Hashable, DTensor]]] = {}
    for key, param, name, value in found:
        if isinstance(value, DTensor):
            groups.setdefault(_group_key(param, name, value), []).append((key, name, value))
        else:
            result[key][name] = torch.empty_like(param, dtype=value.dtype).copy_(value)
    for _, members in _in_one_order(groups):
        places = [params[key].place for key, _, _ in members]
        store, like = places[0].store, members[0][2].to_local()
        buffer = like.new_empty(store.layout.padded_shard_numel)
        from_dtensors(places, [value for _, _, value in members], buffer)
        parts = store.split(buffer)
        for (key, name, _), place in zip(members, places, strict=True):
            result[key][name] = piece_tensor(parts[place.index], place)
    return result


def _entries(state: State, params: Mapping[Any, Any]) -> Iterator[tuple[Any, PieceTensor, Hashable, Tensor]]:
    """What becomes a PieceTensor, by the parameter's name: in one order on all ranks."""
    pieces = [(key, param) for key, param in params.items() if _is_piece(param)]
    for key, param in sorted(pieces, key=lambda each: each[1].place.name):
        for name, value in sorted(state.get(key, {}).items(), key=lambda item: str(item[0])):
            if isinstance(value, Tensor) and not isinstance(value, PieceTensor) and value.shape == param.shape:
                yield key, param, name, value


def _is_piece(param: Any) -> bool:
    return isinstance(param, PieceTensor)


def _group_key(param: PieceTensor, name: Hashable, value: Tensor) -> _GroupKey:
    store = param.place.store
    return store.layout.params[0].name, str(name), str(value.dtype), id(store)


def _in_one_order(groups: Mapping[_GroupKey, list[Any]]) -> list[tuple[_GroupKey, list[Any]]]:
    """Groups by name. Before the root has run, units may have parameters of one name; these stay in the optimizer's order."""
    return sorted(groups.items(), key=lambda item: item[0][:3])


def _described(value: Tensor) -> dict[str, str]:
    cut = {"placements": str(value.placements)} if isinstance(value, DTensor) else {}
    return {"kind": type(value).__name__, "dtype": str(value.dtype), **cut}


def _show(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return {**state_dict, "state": as_dtensors(state_dict["state"])}


def _take(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    # Of other lengths than the optimizer's, for torch to complain of.
    return {**state_dict, "state": as_pieces(state_dict["state"], dict(zip(keys, params, strict=False)))}


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if optimizer in _hooked:
        return
    _hooked.add(optimizer)
    params = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    if any(isinstance(param, PieceTensor) for param in params):
        optimizer.register_state_dict_post_hook(_show)
        optimizer.register_load_state_dict_pre_hook(_take)
        if optimizer.state:
            loaded = as_pieces(optimizer.state, {param: param for param in params})
            for param, values in loaded.items():
                optimizer.state[param].update(values)


register_optimizer_step_pre_hook(_before_step)
