"""Converts PieceTensors to the tensors of sharded state dicts and back, and the hooks of `fully_shard` that do it (R36).

State dicts are therefore the same under every layout, and checkpoints load from any layout into any other.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from crossframe.state import state_key
from torch_backend.engine._bucket import Bucket
from torch_backend.engine._unit import unit_of
from torch_backend.param_registration._pieces import PieceRegistrar
from torch_backend.param_registration._registered_params import Registration
from torch_backend.pieces._fill_from_state_dict import fill
from torch_backend.pieces._piece_location import PieceLocation
from torch_backend.pieces._piece_moves import as_sharded
from torch_backend.pieces._piece_tensor import PieceTensor, piece_tensor
from torch_backend.pieces._sharded_tensors import shape_and_dtype


def show_dtensors(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """State dict hook: replace this unit's PieceTensors by DTensors, under all their names (R36).

    All ranks of the shard group ask for the state dict. With `keep_vars=True` it has the parameters themselves.
    """
    unit = unit_of(module)
    for bucket in unit.buckets:
        registrar = bucket.registrar
        if isinstance(registrar, PieceRegistrar):
            keys = [key for key in piece_keys(bucket, state) if not isinstance(state[key], nn.Parameter)]
            if keys:
                registrar.adopt()
                show_sharded(bucket, registrar.locations, state, keys, unit=unit.name)


def piece_keys(bucket: Bucket, state: dict[str, Any]) -> list[str]:
    """The keys of a state dict under which there are pieces of a bucket's parameters."""
    store = bucket.store
    return [key for key, value in state.items() if isinstance(value, PieceTensor) and value.location.store is store]


def show_sharded(
    bucket: Bucket, locations: Sequence[PieceLocation], state: dict[str, Any], keys: Sequence[str], *, unit: str
) -> None:
    """In a state dict, replace PieceTensors by the tensors of a sharded state dict.

    Args:
        locations: of all parameters of the bucket.
        keys: of the PieceTensors.
    """
    indices = sorted({state[key].location.index for key in keys})
    if indices:
        made = as_sharded([locations[i] for i in indices], bucket.store.buffer.to(bucket.device), unit=unit)
        shown = dict(zip(indices, made, strict=True))
        state.update({key: shown[state[key].location.index] for key in keys})


def take_dtensors(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Load hook: replace the tensors of a state dict for this unit's parameters by PieceTensors; see `take`."""
    unit = unit_of(module)
    for bucket in unit.buckets:
        if isinstance(bucket.registrar, PieceRegistrar):
            take(
                bucket,
                bucket.registrar.locations,
                state,
                paths_of(module, bucket.registrar.registered, prefix),
                unit.name,
            )


def paths_of(module: nn.Module, registered: Iterable[Registration], prefix: str) -> dict[int, list[str]]:
    """The keys that each parameter may have in a state dict, by its index.

    Args:
        registered: where parameters are registered, below `module`.
        prefix: of the module, in the state dict.
    """
    paths: dict[nn.Module, list[str]] = {}
    for path, inner in module.named_modules(remove_duplicate=False):
        paths.setdefault(inner, []).append(path)
    keys: dict[int, list[str]] = {}
    for i, owner, attribute in registered:
        for path in paths.get(owner, ()):
            # Wrappers inside the unit (activation checkpointing) put their part into the names later.
            for each in dict.fromkeys((path, state_key(path))):
                keys.setdefault(i, []).append(f"{prefix}{each}.{attribute}" if each else prefix + attribute)
    return keys


def take(
    bucket: Bucket, locations: Sequence[PieceLocation], state: dict[str, Any], paths: dict[int, list[str]], unit: str
) -> None:
    """In a state dict, replace the tensors for a bucket's parameters by PieceTensors. All ranks load the same names; see `fill`.
    A tensor of another shape stays, and torch reports it.

    Args:
        paths: the keys that each parameter may have, by its index.

    Raises:
        StateDictError: tensors on another mesh or with another layout; the message names them.
    """
    store = bucket.store
    keys: dict[int, list[str]] = {}
    for i, names in paths.items():
        for key in names:
            if isinstance(state.get(key), Tensor) and shape_and_dtype(state[key])[0] == locations[i].full_shape:
                keys.setdefault(i, []).append(key)
    device = store.buffer.device
    if device.type == "meta" and keys:  # what is loaded may make the unit real
        device = state[next(iter(keys.values()))[-1]].device
    line = torch.empty_like(store.buffer, device=device)
    # Of the names of a shared parameter the last one counts.
    fill(line, store, ((names[-1], locations[i], state[names[-1]]) for i, names in keys.items()), unit=unit)
    for i, names in keys.items():
        for key in names:
            state[key] = piece_tensor(store.split(line)[i], locations[i])
