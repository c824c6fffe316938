"""State dicts of modules whose parameters are PieceTensors: DTensors outside, PieceTensors inside (R36).

The hooks that `fully_shard` registers. State dicts then are what they are under the per-parameter layout, so that checkpoints go
from any layout to any other.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from crossframe.errors import StateDictError
from torch_backend.bucket import Bucket
from torch_backend.exposure.pieces import PieceExposure
from torch_backend.piece_moves import from_dtensors, to_dtensors
from torch_backend.piece_tensor import PieceTensor, piece_tensor, same_place
from torch_backend.slots import canonical_name
from torch_backend.unit import unit_of


def show_dtensors(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Of a sharded module's state dict: put DTensors in the place of this unit's PieceTensors, under all their names (R36).

    All ranks of the shard group ask for the state dict. What is asked for with `keep_vars=True` are the parameters themselves.
    """
    unit = unit_of(module)
    for bucket in unit.buckets:
        exposure = bucket.exposure
        if not isinstance(exposure, PieceExposure):
            continue
        named = [
            (key, value.place.index)
            for key, value in state.items()
            if isinstance(value, PieceTensor)
            and value.place.store is bucket.store
            and not isinstance(value, nn.Parameter)
        ]
        if named:
            exposure.adopt()
            indices = sorted({i for _, i in named})
            dtensors = to_dtensors([exposure.places[i] for i in indices], bucket.store.buffer, unit=unit.name)
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
    paths: dict[nn.Module, list[str]] = {}
    for path, inner in module.named_modules(remove_duplicate=False):
        paths.setdefault(inner, []).append(path)
    for bucket in unit.buckets:
        if isinstance(bucket.exposure, PieceExposure):
            _take(bucket, bucket.exposure, state, prefix, paths, unit.name)


def _take(
    bucket: Bucket,
    exposure: PieceExposure,
    state: dict[str, Any],
    prefix: str,
    paths: dict[nn.Module, list[str]],
    unit: str,
) -> None:
    places, store = exposure.places, bucket.store
    keys: dict[int, list[str]] = {}
    for i, owner, attribute in exposure.registered:
        for path in paths.get(owner, ()):
            # Wrappers inside the unit (activation checkpointing) put their part into the names later.
            for key in dict.fromkeys(
                f"{prefix}{p}.{attribute}" if p else prefix + attribute for p in (path, canonical_name(path))
            ):
                if isinstance(state.get(key), Tensor) and state[key].shape == places[i].shape:
                    keys.setdefault(i, []).append(key)
    device = store.buffer.device
    if device.type == "meta" and keys:  # what is loaded may make the unit real
        device = state[next(iter(keys.values()))[-1]].device
    values = torch.empty_like(store.buffer, device=device)
    dtensors: dict[int, DTensor] = {}
    wrong = []
    for i, names in keys.items():
        value, part = state[names[-1]], store.split(values)[i]  # of the names of a shared parameter the last one counts
        if isinstance(value, PieceTensor):
            if same_place(value.place, places[i]):
                part.copy_(value.local)
            else:
                wrong.append(f"{names[-1]!r} is {value!r}, cut otherwise than here")
        elif isinstance(value, DTensor):
            if value.device_mesh == places[i].mesh:
                dtensors[i] = value
            else:
                wrong.append(f"{names[-1]!r} is on {value.device_mesh}")
        else:
            piece_tensor(part, places[i]).copy_(value)
    if wrong:
        raise StateDictError(
            f"unit {unit!r}, rank {store.rank}: expected DTensors on {places[0].mesh}, or full tensors, but {'; '.join(wrong)}; "
            "use to_dtensor() or full_tensor() of the model that they come from"
        )
    if dtensors:
        from_dtensors([places[i] for i in dtensors], list(dtensors.values()), values, unit=unit)
    for i, names in keys.items():
        for key in names:
            state[key] = piece_tensor(store.split(values)[i], places[i])
