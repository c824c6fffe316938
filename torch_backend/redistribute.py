"""From a bucket's flat or ragged shards to DTensors sharded on dim 0, and back: as state dicts hold them (R36).

The core lists the copies (crossframe.layout.overlay). Each element moves once, from the rank that holds it under one layout to
the rank that holds it under the other, so that no rank ever has more of a parameter than its two pieces. A bucket takes one
all-to-all.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from crossframe.errors import StateDictError
from crossframe.layout import Layout, PerParamLayout, Sharding, Transfer, overlay
from crossframe.mesh import MeshSpec
from torch_backend.bucket import Bucket
from torch_backend.collectives import Communicator
from torch_backend.exposure.pieces import PieceExposure
from torch_backend.piece_place import Place
from torch_backend.piece_tensor import PieceTensor, piece_tensor, same_place
from torch_backend.slots import canonical_name
from torch_backend.unit import unit_of

PHASE = "state"


@dataclass(frozen=True)
class _Run:
    """Elements `start:stop` of this rank's buffer, which another rank of the group has or gets."""

    peer: int
    start: int
    stop: int


def _runs(layout: Layout, other: Layout, rank: int, names: set[str]) -> list[_Run]:
    """What this rank's buffer under `layout` exchanges with the buffers under `other`, by the other rank and then in the order of
    parameters and elements: whichever side of a copy asks, it gets the same order."""
    source, target = (Sharding((("", each),), MeshSpec(shard=each.world_size)) for each in (other, layout))
    transfers: Iterator[Transfer] = overlay(source, target, rank)
    runs = [_Run(t.source_rank, t.target_start, t.target_start + t.numel) for t in transfers if t.name in names]
    return sorted(runs, key=lambda run: run.peer)


def _numels(runs: Sequence[_Run], size: int) -> list[int]:
    numels = [0] * size
    for run in runs:
        numels[run.peer] += run.stop - run.start
    return numels


def move(
    values: Tensor,
    layout: Layout,
    out: Tensor,
    out_layout: Layout,
    shards: Communicator,
    indices: Sequence[int],
    *,
    unit: str,
) -> None:
    """Fill a rank's buffer under one layout from all ranks' buffers under another. All ranks of the group call it alike.

    Args:
        values: shape (layout.padded_shard_numel,).
        out: shape (out_layout.padded_shard_numel,), of the dtype of `values`. What no parameter lies in keeps its values.
        indices: of the parameters that are moved.
        unit: for the trace.
    """
    names = {layout.params[i].name for i in indices}
    to_send = _runs(layout, out_layout, shards.rank, names)
    to_receive = _runs(out_layout, layout, shards.rank, names)
    sent = torch.cat([values[:0], *(values[run.start : run.stop] for run in to_send)])
    splits = _numels(to_send, shards.size), _numels(to_receive, shards.size)
    received = shards.exchange(sent, *splits, unit=unit, phase=PHASE)
    parts = received.split([run.stop - run.start for run in to_receive])
    for run, part in zip(to_receive, parts, strict=True):
        out[run.start : run.stop] = part


def _per_param(layout: Layout) -> PerParamLayout:
    """The layout of DTensors sharded on dim 0."""
    return PerParamLayout(layout.params, layout.world_size)


def _spec(place: Place, dtype: torch.dtype) -> DTensorSpec:
    stride = torch.empty(place.shape, device="meta").stride()
    return DTensorSpec(place.mesh, place.placements, TensorMeta(place.shape, stride, dtype))


def to_dtensors(
    places: Sequence[Place], values: Tensor, indices: Sequence[int] | None = None, *, unit: str = ""
) -> list[DTensor]:
    """DTensors of a bucket's parameters, or of what is laid out like them (a buffer of optimizer state).

    Args:
        places: of all parameters of the bucket, in the layout's order.
        values: shape (padded_shard_numel,): this rank's buffer under the bucket's layout, in any dtype.
        indices: of the parameters that are wanted; all of them if None.
        unit: for the trace.

    Returns:
        A DTensor for each of `indices`, sharded on dim 0 of the same ranks, replicated over the first axis of a hybrid mesh.
        They share one new buffer of this rank's size.
    """
    indices = range(len(places)) if indices is None else indices
    layout, shards = places[0].layout, places[0].shards
    target = _per_param(layout)
    out = values.new_empty(target.padded_shard_numel)
    with torch.no_grad():
        move(values, layout, out, target, shards, indices, unit=unit)
    found = []
    for i in indices:
        shape, start = target.shard_shape(i, shards.rank), target.columns[i].start
        local = out[start : start + math.prod(shape)].view(shape)
        found.append(DTensor.__new__(DTensor, local, _spec(places[i], values.dtype), requires_grad=False))
    return found


def from_dtensors(
    places: Sequence[Place], dtensors: Sequence[DTensor | None], values: Tensor, *, unit: str = ""
) -> None:
    """The inverse of `to_dtensors`: fill a buffer that is laid out like the bucket's shard.

    Args:
        places: of all parameters of the bucket, in the layout's order.
        dtensors: one a parameter, on the same mesh, of the parameter's shape, in any dtype and of any placements; None leaves the
            parameter's part of `values` as it is. On all ranks the same ones are None.
        values: shape (padded_shard_numel,). Padding keeps its values.
        unit: for the trace.
    """
    layout, shards = places[0].layout, places[0].shards
    source = _per_param(layout)
    buffer = values.new_empty(source.padded_shard_numel)
    indices = [i for i, dtensor in enumerate(dtensors) if dtensor is not None]
    with torch.no_grad():
        for i in indices:
            dtensor, place = dtensors[i], places[i]
            assert dtensor is not None
            if dtensor.placements != place.placements:
                dtensor = dtensor.redistribute(place.mesh, place.placements)
            local, start = dtensor.to_local(), source.columns[i].start
            buffer[start : start + local.numel()] = local.reshape(-1)
        move(buffer, source, values, layout, shards, indices, unit=unit)


def to_dtensor(tensor: PieceTensor) -> DTensor:
    """One tensor alone. All ranks of its shard group call it."""
    place = tensor.place
    places = [Place(place.store, i, place.mesh, place.shards) for i in range(len(place.layout.params))]
    piece = place.store.split(torch.empty(place.layout.padded_shard_numel, device="meta"))[place.index]
    values = tensor.local.new_empty(place.layout.padded_shard_numel)
    values[piece.storage_offset() : piece.storage_offset() + place.numel] = tensor.local.detach()
    (dtensor,) = to_dtensors(places, values, [place.index])
    return dtensor


# The hooks of a module's state dict.


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
            dtensors = to_dtensors(exposure.places, bucket.store.buffer, indices, unit=unit.name)
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
    dtensors: list[DTensor | None] = [None] * len(places)
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
    if any(dtensor is not None for dtensor in dtensors):
        from_dtensors(places, dtensors, values, unit=unit)
    for i, names in keys.items():
        for key in names:
            state[key] = piece_tensor(store.split(values)[i], places[i])
