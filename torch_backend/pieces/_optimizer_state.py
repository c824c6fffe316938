"""Optimizer state of PieceTensors: DTensors in state dicts, PieceTensors inside (R37).

An optimizer gets the hooks for this at its first step. State that was loaded before is converted then.
"""

import weakref
from collections.abc import Hashable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

import torch_backend.memory._optimizer_steps  # noqa: F401 - its hook rejects ZeroRedundancyOptimizer, before those here run
from crossframe.errors import StateDictError
from torch_backend.pieces._fill_from_state_dict import fill
from torch_backend.pieces._piece_tensor import PieceTensor, dtensors_of, piece_tensor
from torch_backend.ranks._consensus import agree, withdraw

TITLE = "loading of optimizer state"


# State by parameter (or its key) and by entry.
State = Mapping[Any, Mapping[Hashable, Any]]

# The entries of one bucket, name and dtype, which one collective moves. Groups are sorted, so that the order of collectives is
# the same on all ranks, even if their optimizers hold the parameters in different orders.
_GroupKey = tuple[str, str, str, int]

_hooked: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


def as_dtensors(state: State) -> dict[Any, dict[Hashable, Any]]:
    """State with DTensors instead of PieceTensors. One all-to-all for each bucket, name and dtype; all ranks call it."""
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
    """The inverse: DTensors and full tensors of a parameter's shape become PieceTensors. All ranks call it.

    Args:
        state: by the keys of `params`.
        params: the parameters, in any order. The state of those that are not PieceTensors stays as it is.

    Raises:
        StateDictError: a DTensor on another mesh.
        AgreementError: ranks were given different entries. Both errors are raised on all ranks, and nothing has been converted.
    """
    result = {key: dict(values) for key, values in state.items()}
    groups_of = {
        param.location.shards.ranks: param.location.shards.group for param in params.values() if _is_piece(param)
    }
    shards = [groups_of[ranks] for ranks in sorted(groups_of)]
    found = list(_entries(result, params))
    try:
        for _, param, name, value in found:
            if isinstance(value, DTensor) and value.device_mesh != param.device_mesh:
                raise StateDictError(
                    f"parameter {param.location.name!r}: its state {name!r} is on {value.device_mesh}, expected "
                    f"{param.device_mesh}, the mesh of its module, or a full tensor"
                )
    except StateDictError as error:
        withdraw(shards, TITLE, error)
        raise
    description = [(f"state {name!r} of {param.location.name!r}", _described(value)) for _, param, name, value in found]
    for group in shards:
        agree([group], TITLE, description, advice="load the same state dict on every rank")
    groups: dict[_GroupKey, list[tuple[Any, PieceTensor, Hashable, Tensor]]] = {}
    for key, param, name, value in found:
        groups.setdefault(_group_key(param, name, value), []).append((key, param, name, value))
    for _, members in _in_one_order(groups):
        store = members[0][1].location.store
        line = torch.zeros_like(store.buffer, dtype=members[0][3].dtype)
        fill(
            line,
            store,
            ((f"state {name!r} of {param.location.name!r}", param.location, v) for _, param, name, v in members),
        )
        parts = store.split(line)
        for key, param, name, _ in members:
            result[key][name] = piece_tensor(parts[param.location.index], param.location)
    return result


def _entries(state: State, params: Mapping[Any, Any]) -> Iterator[tuple[Any, PieceTensor, Hashable, Tensor]]:
    """The tensors that become PieceTensors, in the order of parameter names, which is the same on all ranks."""
    pieces = [(key, param) for key, param in params.items() if _is_piece(param)]
    for key, param in sorted(pieces, key=lambda each: each[1].location.name):
        for name, value in sorted(state.get(key, {}).items(), key=lambda item: str(item[0])):
            if isinstance(value, Tensor) and not isinstance(value, PieceTensor) and value.shape == param.shape:
                yield key, param, name, value


def _is_piece(param: Any) -> bool:
    return isinstance(param, PieceTensor)


def _group_key(param: PieceTensor, name: Hashable, value: Tensor) -> _GroupKey:
    store = param.location.store
    return store.layout.params[0].name, str(name), str(value.dtype), id(store)


def _in_one_order(groups: Mapping[_GroupKey, list[Any]]) -> list[tuple[_GroupKey, list[Any]]]:
    """Groups in the order of names. Before the root has run, units may have equal names; these stay in the optimizer's order."""
    return sorted(groups.items(), key=lambda item: item[0][:3])


def _described(value: Tensor) -> dict[str, str]:
    cut = {"placements": str(value.placements)} if isinstance(value, DTensor) else {}
    return {"kind": type(value).__name__, "dtype": str(value.dtype), **cut}


def _show(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return {**state_dict, "state": as_dtensors(state_dict["state"])}


def _take(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    # If the lengths differ, torch raises.
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
