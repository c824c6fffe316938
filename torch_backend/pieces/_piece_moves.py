"""Moves a bucket from its flat or ragged shards to DTensors sharded on dim 0, and back.

The core lists the copies (crossframe.layout.overlay). Each element moves once, from the rank that holds it under one layout to
the rank that holds it under the other, so that no rank ever has more of a parameter than its two pieces and what of them is
under way. A bucket takes one all-to-all.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from crossframe.layout import Layout, PerParamLayout, Sharding, Transfer, overlay
from crossframe.mesh import MeshSpec
from torch_backend.pieces._piece_place import Place
from torch_backend.ranks._collectives import Communicator

PHASE = "state"


# Of parameter i the elements from start to stop, both counted in the buffer of a layout, as a 1-D tensor that can be written to.
View = Callable[[int, int, int], Tensor]


@dataclass(frozen=True, slots=True)
class _Run:
    """Elements `start:stop` of parameter `index` in this rank's buffer, which rank `peer` of the group has or gets from
    `peer_start` on in its own."""

    index: int
    peer: int
    start: int
    stop: int
    peer_start: int


def _runs(layout: Layout, other: Layout, rank: int, indices: Sequence[int]) -> list[_Run]:
    """What this rank's buffer under `layout` exchanges with the buffers under `other`, by the other rank and then in the order of
    parameters and elements: whichever side of a copy asks, it gets the same order."""
    wanted = {layout.params[i].name: i for i in indices}
    source, target = (Sharding((("", each),), MeshSpec(shard=each.world_size)) for each in (other, layout))
    transfers: Iterator[Transfer] = overlay(source, target, rank)
    runs = [
        _Run(wanted[t.name], t.source_rank, t.target_start, t.target_start + t.numel, t.source_start)
        for t in transfers
        if t.name in wanted
    ]
    return sorted(runs, key=lambda run: run.peer)


def _numels(runs: Sequence[_Run], size: int) -> list[int]:
    numels = [0] * size
    for run in runs:
        numels[run.peer] += run.stop - run.start
    return numels


def _move(
    values: View,
    layout: Layout,
    out: View,
    out_layout: Layout,
    shards: Communicator,
    indices: Sequence[int],
    like: Tensor,
    *,
    unit: str,
) -> None:
    """Fill what a rank has under one layout from what all ranks have under another. All ranks of the group call it alike. What
    stays on a rank is copied there, and takes no further memory.

    Args:
        values, out: what this rank has under `layout` and under `out_layout`.
        indices: of the parameters that are moved.
        like: of the dtype and on the device that are moved.
        unit: for the trace.
    """
    runs = _runs(out_layout, layout, shards.rank, indices)
    for run in runs:
        if run.peer == shards.rank:
            out(run.index, run.start, run.stop).copy_(
                values(run.index, run.peer_start, run.peer_start + run.stop - run.start)
            )
    if shards.size == 1:
        return
    to_send = [run for run in _runs(layout, out_layout, shards.rank, indices) if run.peer != shards.rank]
    to_receive = [run for run in runs if run.peer != shards.rank]
    splits = _numels(to_send, shards.size), _numels(to_receive, shards.size)
    sent = like.new_empty(sum(splits[0]))
    for run, part in zip(to_send, sent.split([run.stop - run.start for run in to_send]), strict=True):
        part.copy_(values(run.index, run.start, run.stop))
    received = shards.exchange(sent, *splits, unit=unit, phase=PHASE)
    for run, part in zip(to_receive, received.split([run.stop - run.start for run in to_receive]), strict=True):
        out(run.index, run.start, run.stop).copy_(part)


def _in_buffer(buffer: Tensor) -> View:
    return lambda _, start, stop: buffer[start:stop]


def _in_rows(rows: Mapping[int, Tensor], layout: PerParamLayout) -> View:
    flat = {i: local.reshape(-1) for i, local in rows.items()}

    def view(i: int, start: int, stop: int) -> Tensor:
        first = layout.columns[i].start
        return flat[i][start - first : stop - first]

    return view


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
    # Each in memory of its own: torch cannot deep-copy a DTensor of what begins in the midst of memory.
    rows = {i: values.new_empty(target.shard_shape(i, shards.rank)) for i in indices}
    _move(_in_buffer(values), layout, _in_rows(rows, target), target, shards, indices, values, unit=unit)
    return [rows[i] for i in indices]


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
    _move(_in_rows(rows, source), source, _in_buffer(values), layout, shards, list(rows), values, unit=unit)


def dtensor_of_rows(rows: Tensor, place: Place) -> DTensor:
    """The DTensor of a parameter whose rows these are, sharded on dim 0 of the place's mesh; under tensor parallelism on the
    mesh of both."""
    if place.whole is not None:
        return place.whole.sharded.dtensor(rows)
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
    if place.whole is not None:
        return place.whole.is_over(mesh)
    return mesh == place.mesh or (mesh.ndim == 1 and tuple(mesh.mesh.tolist()) == place.shards.ranks)


def part_of_dtensor(dtensor: DTensor, place: Place) -> tuple[Tensor, bool]:
    """What this rank takes of a DTensor whose mesh `is_over` a place: its rows, and True; or under tensor parallelism perhaps its
    whole part of the parameter, and False. All ranks of the mesh call it."""
    if place.whole is None:
        return rows_of_dtensor(dtensor), True
    return place.whole.part(dtensor)


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
