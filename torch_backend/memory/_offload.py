"""CPU offload: where shards are stored, the copies of shards to the device for the all-gather, and of gradients to the CPU.

The optimizer runs on the CPU, so backward ends with the host waiting for these copies (`Streams.end_reductions`).
"""

import torch
from torch import Tensor


def storage_of_shards(
    param: Tensor, compute: torch.device, *, offload: bool, pinned: bool
) -> tuple[torch.device, bool]:
    """(the device of the shards of a bucket, whether they are in pinned memory).

    Args:
        param: a full parameter of the bucket. Shards on the meta device are offloaded when they are materialized.
        compute: the device of the computation.
        pinned: use pinned memory where copies from it do not block the host.
    """
    device = torch.device("cpu") if offload and not param.is_meta else param.device
    return device, offload and pinned and compute.type != device.type == "cpu"


def to_compute(shard: Tensor, full: Tensor) -> Tensor:
    """The shard on the device and in the dtype of the unsharded parameters. A copy that also casts would block the host."""
    return shard.to(full.device, non_blocking=True).to(full.dtype)


def to_storage(grad: Tensor, device: torch.device, *, read_now: bool) -> Tensor:
    """The reduced gradient on the device of its shard.

    Args:
        read_now: the host reads it before backward ends, to add it to an existing gradient or for a user's hook, so it waits
            for the copy.
    """
    return grad.to(device, non_blocking=not read_now)
