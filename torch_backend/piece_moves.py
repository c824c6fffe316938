"""From a bucket's flat or ragged shards to rows of each parameter, as DTensors sharded on dim 0 hold them, and back.

The core lists the copies (crossframe.layout.overlay). Each element moves once, from the rank that holds it under one layout to
the rank that holds it under the other, so that no rank ever has more of a parameter than its two pieces. A bucket takes one
all-to-all.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from crossframe.layout import Layout, PerParamLayout, Sharding, Transfer, overlay
from crossframe.mesh import MeshSpec
from torch_backend.collectives import Communicator
from torch_backend.piece_place import Place
from torch_backend.piece_tensor import PieceTensor

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
    """The layout of rows: each parameter cut on dim 0."""
    return PerParamLayout(layout.params, layout.world_size)


@torch.no_grad()
def to_rows(
    values: Tensor, layout: Layout, shards: Communicator, indices: Sequence[int], *, unit: str = ""
) -> list[Tensor]:
    """This rank's rows of some of a bucket's parameters, or of what is laid out like them (optimizer state).

    Args:
        values: shape (padded_shard_numel,): this rank's buffer under the bucket's layout, in any dtype.
        indices: of the parameters that are wanted; on all ranks of the group the same.
        unit: for the trace.

    Returns:
        For each of them a tensor in memory of its own, of the parameter's shape but for dim 0.
    """
    target = _per_param(layout)
    out = values.new_empty(target.padded_shard_numel)
    move(values, layout, out, target, shards, indices, unit=unit)
    found = []
    for i in indices:
        shape, start = target.shard_shape(i, shards.rank), target.columns[i].start
        # Memory of its own: torch cannot deep-copy a DTensor of what begins in the midst of memory.
        found.append(out[start : start + math.prod(shape)].clone().view(shape))
    return found


@torch.no_grad()
def from_rows(
    rows: Mapping[int, Tensor], values: Tensor, layout: Layout, shards: Communicator, *, unit: str = ""
) -> None:
    """The inverse of `to_rows`: fill a buffer that is laid out like the bucket's shard.

    Args:
        rows: by the index of the parameter what this rank has of it, in any dtype; on all ranks of the same parameters.
        values: shape (padded_shard_numel,). What belongs to no other parameter keeps its values.
        unit: for the trace.
    """
    source = _per_param(layout)
    buffer = values.new_empty(source.padded_shard_numel)
    for i, local in rows.items():
        start = source.columns[i].start
        buffer[start : start + local.numel()] = local.reshape(-1)
    move(buffer, source, values, layout, shards, list(rows), unit=unit)


def dtensor_of_rows(rows: Tensor, place: Place) -> DTensor:
    """The DTensor of a parameter whose rows these are, sharded on dim 0 of the place's mesh."""
    stride = torch.empty(place.shape, device="meta").stride()
    spec = DTensorSpec(place.mesh, place.placements, TensorMeta(place.shape, stride, rows.dtype))
    return DTensor.__new__(DTensor, rows, spec, requires_grad=False)


def to_dtensors(places: Sequence[Place], values: Tensor, *, unit: str = "") -> list[DTensor]:
    """DTensors of parameters of one bucket, or of what is laid out like them (optimizer state).

    Args:
        places: of the parameters that are wanted, at least one.
        values: shape (padded_shard_numel,): this rank's buffer under the bucket's layout, in any dtype.
        unit: for the trace.

    Returns:
        A DTensor for each place, sharded on dim 0 of the same ranks, replicated over the first axis of a hybrid mesh.
    """
    rows = to_rows(values, places[0].layout, places[0].shards, [place.index for place in places], unit=unit)
    return [dtensor_of_rows(local, place) for local, place in zip(rows, places, strict=True)]


@torch.no_grad()
def rows_of_dtensor(dtensor: DTensor) -> Tensor:
    """What this rank has of a DTensor once that is sharded on dim 0 over the last axis of its mesh. All ranks of that call it."""
    wanted = (*[Replicate()] * (dtensor.device_mesh.ndim - 1), Shard(0))
    if dtensor.placements != wanted:
        dtensor = dtensor.redistribute(placements=wanted)
    return dtensor.to_local()


def is_over(mesh: DeviceMesh, place: Place) -> bool:
    """Whether a DTensor's mesh is that of a place, or of the ranks alone that the place's unit is sharded over."""
    return mesh == place.mesh or (mesh.ndim == 1 and tuple(mesh.mesh.tolist()) == place.shards.ranks)


def from_dtensors(places: Sequence[Place], dtensors: Sequence[DTensor], values: Tensor, *, unit: str = "") -> None:
    """The inverse of `to_dtensors`: fill a buffer that is laid out like the bucket's shard.

    Args:
        places: of the parameters that are given, at least one; on all ranks the same.
        dtensors: one a place, on the same mesh, of the parameter's shape, in any dtype and of any placements.
        values: shape (padded_shard_numel,). What belongs to no place keeps its values.
        unit: for the trace.
    """
    rows = {place.index: rows_of_dtensor(dtensor) for dtensor, place in zip(dtensors, places, strict=True)}
    from_rows(rows, values, places[0].layout, places[0].shards, unit=unit)


def to_dtensor(tensor: PieceTensor) -> DTensor:
    """One tensor alone. All ranks of its shard group call it."""
    (dtensor,) = together([tensor])
    return dtensor


def together(tensors: Sequence[PieceTensor]) -> list[DTensor]:
    """Tensors at different places of one bucket, of one dtype, as DTensors, by one all-to-all."""
    store, like = tensors[0].place.store, tensors[0].local
    values = like.new_empty(store.layout.padded_shard_numel)
    with torch.no_grad():
        parts = store.split(values)
        for tensor in tensors:
            parts[tensor.place.index].copy_(tensor.local)
    return to_dtensors([tensor.place for tensor in tensors], values)
