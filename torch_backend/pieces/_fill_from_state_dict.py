"""Fills a bucket's flat buffer from the tensors of a state dict."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from crossframe.errors import StateDictError
from torch_backend.memory._store import ShardStore
from torch_backend.pieces._piece_location import PieceLocation
from torch_backend.pieces._piece_moves import from_rows, is_over, part_of_dtensor
from torch_backend.pieces._piece_tensor import PieceTensor, piece_tensor, same_location
from torch_backend.pieces._sharded_tensors import rows_of_sharded_tensor


@torch.no_grad()
def fill(
    line: Tensor, store: ShardStore, given: Iterable[tuple[str, PieceLocation, Tensor]], *, unit: str = ""
) -> None:
    """Fill a flat buffer from tensors of a state dict. All ranks of the shard group must pass tensors of the same kinds.

    Full tensors must be equal on all ranks. DTensors may have any placements on the unit's mesh. ShardedTensors have chunks of
    rows. PieceTensors have the layout of the store. All dtypes are supported.

    Args:
        line: shape (padded_shard_numel,). The elements of other parameters, and padding, keep their values.
        store: the store of the bucket, with the layout of the buffer.
        given: names for messages, locations in the bucket, and tensors with their shapes. An iterator may create them one at a
            time.
        unit: for messages and the trace.

    Raises:
        StateDictError: a tensor on another mesh or with another layout; the message names all of them. No rows have been
            exchanged.
    """
    parts = store.split(line)
    rows: dict[int, Tensor] = {}
    wrong, location = [], None
    for name, location, value in given:
        part, full = parts[location.index], value
        if isinstance(value, PieceTensor):
            if same_location(value.location, location):
                part.copy_(value.local)
            else:
                wrong.append(f"{name!r} is {value!r}, with another layout")
            continue
        if isinstance(value, ShardedTensor):
            local = rows_of_sharded_tensor(value, store.layout, location.index, store.rank)
            if local is None:
                chunks = f"{store.layout.world_size} chunks of rows"
                wrong.append(f"{name!r} is a ShardedTensor of other shards than {chunks}")
            else:
                rows[location.index] = local
            continue
        if isinstance(value, DTensor):
            if not is_over(value.device_mesh, location):
                wrong.append(f"{name!r} is on {value.device_mesh}")
                continue
            full, is_rows = part_of_dtensor(value, location)
            if is_rows:
                rows[location.index] = full
                continue
        elif location.tp_param is not None:
            wrong.append(f"{name!r} is a plain tensor")
            continue
        piece_tensor(part, location).copy_(full)
    if wrong:
        mesh = location.mesh if location is not None else None
        raise StateDictError(
            f"unit {unit!r}, rank {store.rank}: expected DTensors on {mesh}, or full tensors, but {'; '.join(wrong)}; "
            "use to_dtensor() or full_tensor() of the model that they come from"
        )
    if rows and location is not None:
        from_rows(rows, line, store.layout, location.shards, unit=unit)
