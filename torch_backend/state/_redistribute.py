"""State dict hooks for PieceTensors, which `fully_shard` registers: DTensors outside, PieceTensors inside (R36).

The hooks that `fully_shard` registers. State dicts then are what they are under the per-parameter layout, so that checkpoints go
from any layout to any other.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from crossframe.errors import StateDictError
from crossframe.state import state_key
from torch_backend.engine._bucket import Bucket
from torch_backend.engine._unit import unit_of
from torch_backend.pieces._piece_moves import from_rows, is_over, part_of_dtensor, to_dtensors
from torch_backend.pieces._piece_place import Place
from torch_backend.pieces._piece_tensor import PieceTensor, piece_tensor, same_place
from torch_backend.registration._modules import Registration
from torch_backend.registration._pieces import PieceRegistrar
from torch_backend.state._sharded_tensors import rows_of_sharded_tensor


def show_dtensors(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Of a sharded module's state dict: put DTensors in the place of this unit's PieceTensors, under all their names (R36).

    All ranks of the shard group ask for the state dict. What is asked for with `keep_vars=True` are the parameters themselves.
    """
    unit = unit_of(module)
    for bucket in unit.buckets:
        registrar = bucket.registrar
        if not isinstance(registrar, PieceRegistrar):
            continue
        named = [
            (key, value.place.index)
            for key, value in state.items()
            if isinstance(value, PieceTensor)
            and value.place.store is bucket.store
            and not isinstance(value, nn.Parameter)
        ]
        if named:
            registrar.adopt()
            indices = sorted({i for _, i in named})
            dtensors = to_dtensors([registrar.places[i] for i in indices], bucket.store.buffer, unit=unit.name)
            shown = dict(zip(indices, dtensors, strict=True))
            state.update({key: shown[i] for key, i in named})


def take_dtensors(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a sharded module loads a state dict: put PieceTensors in the place of what it holds for this unit's parameters.

    A DTensor may have any placements on the unit's mesh. Of a plain tensor, which is full and the same on all ranks, each takes
    its part. What has another shape stays, for torch to complain of. All ranks load the same names.

    Raises:
        StateDictError: tensors on another mesh, or cut otherwise; the message names them.
    """
    unit = unit_of(module)
    for bucket in unit.buckets:
        if isinstance(bucket.registrar, PieceRegistrar):
            take(
                bucket, bucket.registrar.places, state, paths_of(module, bucket.registrar.registered, prefix), unit.name
            )


def paths_of(module: nn.Module, registered: Iterable[Registration], prefix: str) -> dict[int, list[str]]:
    """By the index of each parameter, under which keys a state dict may hold it.

    Args:
        registered: where parameters are registered, below `module`.
        prefix: the module's own, in the state dict.
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
    bucket: Bucket, places: Sequence[Place], state: dict[str, Any], paths: dict[int, list[str]], unit: str
) -> None:
    """In a state dict, put PieceTensors in the place of what it holds for a bucket's parameters; see `take_dtensors`.

    Args:
        paths: by the index of each parameter the keys that it may have.
    """
    store = bucket.store
    keys: dict[int, list[str]] = {}
    for i, names in paths.items():
        for key in names:
            if isinstance(state.get(key), Tensor) and state[key].shape == places[i].full_shape:
                keys.setdefault(i, []).append(key)
    device = store.buffer.device
    if device.type == "meta" and keys:  # what is loaded may make the unit real
        device = state[next(iter(keys.values()))[-1]].device
    values = torch.empty_like(store.buffer, device=device)
    rows: dict[int, Tensor] = {}
    wrong = []
    for i, names in keys.items():
        value, part = state[names[-1]], store.split(values)[i]  # of the names of a shared parameter the last one counts
        if isinstance(value, PieceTensor):
            if same_place(value.place, places[i]):
                part.copy_(value.local)
            else:
                wrong.append(f"{names[-1]!r} is {value!r}, cut otherwise than here")
        elif isinstance(value, DTensor):
            if is_over(value.device_mesh, places[i]):
                local, is_rows = part_of_dtensor(value, places[i])
                if is_rows:
                    rows[i] = local
                else:
                    piece_tensor(part, places[i]).copy_(local)
            else:
                wrong.append(f"{names[-1]!r} is on {value.device_mesh}")
        elif isinstance(value, ShardedTensor):
            local = rows_of_sharded_tensor(value, store.layout, i, store.rank)
            if local is None:
                wrong.append(
                    f"{names[-1]!r} is a ShardedTensor of other shards than {store.layout.world_size} chunks of rows"
                )
            else:
                rows[i] = local
        elif places[i].whole is not None:
            wrong.append(f"{names[-1]!r} is a plain tensor")
        else:
            piece_tensor(part, places[i]).copy_(value)
    if wrong:
        raise StateDictError(
            f"unit {unit!r}, rank {store.rank}: expected DTensors on {places[0].mesh}, or full tensors, but {'; '.join(wrong)}; "
            "use to_dtensor() or full_tensor() of the model that they come from"
        )
    if rows:
        from_rows(rows, values, store.layout, places[0].shards, unit=unit)
    for i, names in keys.items():
        for key in names:
            state[key] = piece_tensor(store.split(values)[i], places[i])
