"""ShardStore: the shard of a bucket on this rank, in one buffer that the store owns."""

from collections.abc import Sequence

import torch
from torch import Tensor

from crossframe.layout import Layout
from crossframe.writeback import check_full, writeback_copies


class ShardStore:
    """One rank's shard: the all-gather sends this buffer as it stands, the optimizer writes into it.

    Attributes:
        rank: this rank's place among the shards.
        buffer: shape (padded_shard_numel,), padding filled as the layout says (R05).
        pieces: for each parameter of the layout the elements that this rank holds, 1-D, as views of the buffer; empty
            where it holds none.
    """

    def __init__(self, layout: Layout, rank: int, full: Sequence[Tensor]) -> None:
        self.layout, self.rank = layout, rank
        self._copies = writeback_copies(layout, rank)
        with torch.no_grad():
            self.buffer = torch.empty(layout.padded_shard_numel, dtype=full[0].dtype, device=full[0].device)
            for run in layout.padding(rank):
                self.buffer[run.start : run.stop] = run.fill
            self.pieces = [self.buffer[:0] for _ in layout.params]
            for copy in self._copies:
                self.pieces[copy.index] = self.buffer[copy.shard_start : copy.shard_stop]
            self.write(full)

    def write(self, full: Sequence[Tensor]) -> None:
        """Take over this rank's slices of full parameters, in the layout's order (R20).

        Raises:
            ParamError: a parameter of another shape.
        """
        # All of them first, whether a piece lies here or not: a refusal changes nothing, and every rank refuses alike.
        for spec, value in zip(self.layout.params, full, strict=True):
            check_full(spec, tuple(value.shape))
        with torch.no_grad():
            for copy in self._copies:
                value = full[copy.index].reshape(-1)
                self.pieces[copy.index].copy_(value[copy.param_start : copy.param_stop])

    def split(self, shard: Tensor) -> list[Tensor]:
        """The pieces of another buffer laid out like this shard (a sharded gradient), one a parameter, as views."""
        views = [shard[:0] for _ in self.layout.params]
        for copy in self._copies:
            views[copy.index] = shard[copy.shard_start : copy.shard_stop]
        return views
