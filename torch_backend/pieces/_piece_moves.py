"""Moves a bucket between its layout and the rows of a sharded state dict: DTensors or ShardedTensors cut on dim 0.

The core plans the copies (crossframe.layout.exchange); `_move` executes them. A bucket takes one all-to-all.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from crossframe.layout import Layout, Part, PerParamLayout, exchange
from crossframe.state import StateKind, target_of
from torch_backend.memory._store import cuts_of
from torch_backend.pieces._piece_location import PieceLocation
from torch_backend.pieces._sharded_tensors import sharded_tensor
from torch_backend.ranks._collectives import Communicator

PHASE = "state"

# This rank's 1-D pieces of parameters, by index.
Pieces = Mapping[int, Tensor]


def _move(
    held: Pieces,
    source: Layout,
    wanted: Pieces,
    target: Layout,
    shards: Communicator,
    like: Tensor,
    *,
    unit: str,
) -> None:
    """Copy this rank's pieces under the target layout from the pieces of all ranks under the source layout. All ranks of the
    group must call it.

    Args:
        held, wanted: source and target pieces of the same parameters.
        like: determines dtype and device of communication.
        unit: for the trace.
    """
    plan = exchange(source, target, shards.rank, tuple(sorted(held)))
    for part, other in plan.kept:
        _part(wanted, other).copy_(_part(held, part))
    if shards.size == 1:
        return
    sent = like.new_empty(sum(plan.sent_numels))
    for part, value in zip(plan.sent, sent.split([part.numel for part in plan.sent]), strict=True):
        value.copy_(_part(held, part))
    splits = list(plan.sent_numels), list(plan.received_numels)
    received = shards.exchange(sent, *splits, unit=unit, phase=PHASE)
    for part, value in zip(plan.received, received.split([part.numel for part in plan.received]), strict=True):
        _part(wanted, part).copy_(value)


def _part(pieces: Pieces, part: Part) -> Tensor:
    return pieces[part.index][part.start : part.start + part.numel]


def _in_line(line: Tensor, layout: Layout, rank: int, indices: Sequence[int]) -> Pieces:
    pieces = cuts_of(layout, rank).split(line)
    return {i: pieces[i] for i in indices}


def _in_rows(rows: Mapping[int, Tensor]) -> Pieces:
    return {i: row.reshape(-1) for i, row in rows.items()}


@torch.no_grad()
def to_rows(
    line: Tensor, layout: Layout, shards: Communicator, indices: Sequence[int], *, unit: str = ""
) -> list[Tensor]:
    """This rank's rows of some of a bucket's parameters, or of tensors with the same layout (optimizer state).

    Args:
        line: shape (padded_shard_numel,): this rank's buffer under the bucket's layout, in any dtype.
        indices: the parameters, the same on all ranks of the group.
        unit: for the trace.

    Returns:
        A tensor in separate memory for each parameter, with the parameter's shape except dim 0.
    """
    target = target_of(layout, StateKind.SHARDED)
    assert isinstance(target, PerParamLayout)
    # In separate memory, because torch cannot deep-copy a DTensor of a view.
    rows = {i: line.new_empty(target.shard_shape(i, shards.rank)) for i in indices}
    held = _in_line(line, layout, shards.rank, indices)
    _move(held, layout, _in_rows(rows), target, shards, line, unit=unit)
    return [rows[i] for i in indices]


@torch.no_grad()
def from_rows(
    rows: Mapping[int, Tensor], line: Tensor, layout: Layout, shards: Communicator, *, unit: str = ""
) -> None:
    """The inverse of `to_rows`: fill a buffer with the bucket's layout.

    Args:
        rows: this rank's rows of parameters by index, in any dtype; of the same parameters on all ranks.
        line: shape (padded_shard_numel,). The elements of other parameters, and padding, keep their values.
        unit: for the trace.
    """
    source = target_of(layout, StateKind.SHARDED)
    wanted = _in_line(line, layout, shards.rank, list(rows))
    _move(_in_rows(rows), source, wanted, layout, shards, line, unit=unit)


def as_sharded(locations: Sequence[PieceLocation], line: Tensor, *, unit: str = "") -> list[DTensor | ShardedTensor]:
    """The tensors of a sharded state dict, for parameters of one bucket or tensors with the same layout (optimizer state).

    Args:
        locations: the locations of the parameters.
        line: shape (padded_shard_numel,): this rank's buffer under the bucket's layout, in any dtype.
        unit: for the trace.

    Returns:
        A DTensor for each location, sharded on dim 0 over the shard group and replicated over the first axis of a hybrid mesh; a
        ShardedTensor without a mesh.
    """
    rows = to_rows(
        line, locations[0].layout, locations[0].shards, [location.index for location in locations], unit=unit
    )
    return [_of_rows(row, location) for row, location in zip(rows, locations, strict=True)]


def _of_rows(rows: Tensor, location: PieceLocation) -> DTensor | ShardedTensor:
    if location.tp_param is not None:
        return location.tp_param.sharded.dtensor(rows)
    if location.mesh is None:
        return sharded_tensor(rows, location.shape, -(-location.shape[0] // location.shards.size), location.shards)
    stride = torch.empty(location.shape, device="meta").stride()
    spec = DTensorSpec(location.mesh, location.placements, TensorMeta(location.shape, stride, rows.dtype))
    return DTensor.__new__(DTensor, rows, spec, requires_grad=False)


def is_over(mesh: DeviceMesh, location: PieceLocation) -> bool:
    """Whether a DTensor's mesh is that of a location, or only its shard axis."""
    if location.tp_param is not None:
        return location.tp_param.is_over(mesh)
    return mesh == location.mesh or (mesh.ndim == 1 and tuple(mesh.mesh.tolist()) == location.shards.ranks)


@torch.no_grad()
def part_of_dtensor(dtensor: DTensor, location: PieceLocation) -> tuple[Tensor, bool]:
    """(this rank's rows of a DTensor whose mesh `is_over` a location, True), or under tensor parallelism possibly (its whole
    local tensor, False). All ranks of the mesh must call it."""
    if location.tp_param is not None:
        return location.tp_param.part(dtensor)
    wanted = (*[Replicate()] * (dtensor.device_mesh.ndim - 1), Shard(0))
    if dtensor.placements != wanted:
        dtensor = dtensor.redistribute(placements=wanted)
    return dtensor.to_local(), True
