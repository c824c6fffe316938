"""The shards that a bucket keeps between forward and backward when it reshards to a group of fewer ranks (R08)."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from crossframe.layout import Layout, post_forward
from torch_backend.memory._store import ShardStore
from torch_backend.ranks._collectives import Communicator


class ReshardGroupShard:
    """This rank's shard of the unsharded parameters over the reshard group, in the compute dtype.

    Attributes:
        layout: over the reshard group, the core's `post_forward`.
        communicator: of the reshard group.
        mesh: all ranks as (replicate, shard), with the group's size as the shard axis.
        buffer: shape (padded_shard_numel,), or None while there is none.
        pieces: 1-D view of the buffer for each parameter; empty for a flat layout.
    """

    def __init__(self, layout: Layout, communicator: Communicator, mesh: DeviceMesh) -> None:
        """
        Args:
            layout: the bucket's layout over all ranks of its shard group.
        """
        self.communicator, self.mesh = communicator, mesh
        self.layout = post_forward(layout, communicator.size)
        self.buffer: Tensor | None = None
        self.pieces: list[Tensor] = []

    def take(self, full: Tensor, views: Sequence[Tensor]) -> None:
        """Copy this rank's shard.

        Args:
            full: the unsharded parameters, of shape (unsharded_numel,).
            views: a view of each parameter in `full`.
        """
        with torch.no_grad():
            if self.layout.contiguous:
                numel = self.layout.padded_shard_numel
                self.buffer = full[self.communicator.rank * numel :][:numel].clone()
            else:
                store = ShardStore(self.layout, self.communicator.rank, views)
                self.buffer, self.pieces = store.buffer, store.pieces

    def give(self) -> Tensor:
        """Return and clear the shard."""
        assert self.buffer is not None
        buffer, self.buffer, self.pieces = self.buffer, None, []
        return buffer
