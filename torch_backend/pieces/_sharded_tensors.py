"""Builds ShardedTensors from rows of parameters, and reads them, for FSDP1's sharded state dicts without a device mesh."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard

from crossframe.layout import Layout, PerParamLayout
from torch_backend.ranks._collectives import Communicator


def sharded_tensor(
    local: Tensor, shape: tuple[int, ...], rows: int, shards: Communicator, *, requires_grad: bool = False
) -> ShardedTensor:
    """A ShardedTensor cut on dim 0. It aliases `local`; nothing is communicated.

    Args:
        local: this rank's rows.
        shape: of the full tensor.
        rows: the number of rows of each rank; the last rows may be fewer, and the ranks after them have none.
        shards: the ranks.
        requires_grad: as its metadata states.
    """
    group = shards.group
    # Ranks without rows have no shard, but a tensor without rows has one.
    starts = list(range(0, shape[0], rows)) if shape[0] else [0]
    metadata = [
        ShardMetadata([start, *[0] * (len(shape) - 1)], [min(rows, shape[0] - start), *shape[1:]], _place(group, k))
        for k, start in enumerate(starts)
    ]
    own = [Shard(local, metadata[shards.rank])] if shards.rank < len(metadata) else []
    properties = TensorProperties(dtype=local.dtype, requires_grad=requires_grad, pin_memory=local.is_pinned())
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        own, ShardedTensorMetadata(metadata, torch.Size(shape), properties), process_group=group
    )


def _place(group: dist.ProcessGroup, k: int) -> str:
    """The location of rank k's shard as torch writes it: on the device of the group's collectives."""
    kinds = [kind.type for kind in group._device_types]
    device = "cpu" if "cpu" in kinds else kinds[0]
    rank = dist.get_global_rank(group, k)
    where = device if device == "cpu" else f"{device}:{rank % torch.get_device_module(device).device_count()}"
    return f"rank:{rank}/{where}"


def shape_and_dtype(value: Tensor) -> tuple[torch.Size, torch.dtype]:
    """The shape and dtype of a tensor; of a ShardedTensor from its metadata, since torch dispatches its attributes slowly."""
    if isinstance(value, ShardedTensor):
        metadata = value.metadata()
        return metadata.size, metadata.tensor_properties.dtype
    return value.shape, value.dtype


def rows_of_sharded_tensor(value: ShardedTensor, layout: Layout, i: int, rank: int) -> Tensor | None:
    """This rank's rows of parameter i, if its local shards are these rows; else None. Those of several shards are copied."""
    rows = PerParamLayout((layout.params[i],), layout.world_size)
    shape, start = rows.shard_shape(0, rank), rank * rows.chunk_rows(0)
    shards = sorted(value.local_shards(), key=lambda shard: shard.metadata.shard_offsets)
    if 0 in shape:
        own = shards[0].tensor if shards else torch.empty(shape, dtype=value.dtype)
        return own if len(shards) < 2 and tuple(own.shape) == shape else None
    stop = start
    for shard in shards:
        sizes = tuple(shard.tensor.shape)
        if list(shard.metadata.shard_offsets) != [stop, *[0] * (len(shape) - 1)] or sizes[1:] != shape[1:]:
            return None
        stop += sizes[0]
    if stop - start != shape[0]:
        return None
    return shards[0].tensor if len(shards) == 1 else torch.cat([shard.tensor for shard in shards])
