"""The shards that a bucket keeps between forward and backward when it reshards to a smaller group (R08)."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from crossframe.layout import Layout, post_forward
from torch_backend.memory._store import ShardStore
from torch_backend.ranks._collectives import Communicator


class GroupShard:
    """This rank's part of the full parameters, over the ranks of a smaller group, in the dtype of compute.

    Attributes:
        layout: over the smaller group, the core's `post_forward`.
        communicator: between its ranks.
        mesh: all ranks as (replicate, shard), the shard axis of that size.
        buffer: shape (padded_shard_numel,); None: not held now.
        pieces: per parameter, what this rank holds, 1-D, as views of the buffer; none where the layout is one line.
    """

    def __init__(self, layout: Layout, communicator: Communicator, mesh: DeviceMesh) -> None:
        """
        Args:
            layout: of the bucket, over all ranks of its shard group.
        """
        self.communicator, self.mesh = communicator, mesh
        self.layout = post_forward(layout, communicator.size)
        self.buffer: Tensor | None = None
        self.pieces: list[Tensor] = []

    def take(self, full: Tensor, views: Sequence[Tensor]) -> None:
        """Keep this rank's part.

        Args:
            full: shape (unsharded_numel,).
            views: each parameter in it.
        """
        with torch.no_grad():
            if self.layout.contiguous:
                numel = self.layout.padded_shard_numel
                self.buffer = full[self.communicator.rank * numel :][:numel].clone()
            else:
                store = ShardStore(self.layout, self.communicator.rank, views)
                self.buffer, self.pieces = store.buffer, store.pieces

    def give(self) -> Tensor:
        """The part, which is no longer held here."""
        assert self.buffer is not None
        buffer, self.buffer, self.pieces = self.buffer, None, []
        return buffer
