"""GatherBuffer: the memory of a bucket's full parameters, and the parameters that alias it."""

import torch
from torch import Tensor, nn

from crossframe.layout import Layout
from torch_backend.collectives import Communicator, Work


class GatherBuffer:
    """Full parameters, allocated while a unit is unsharded and freed otherwise.

    [Note: leaves that alias] Autograd sees `leaves`: one nn.Parameter an original parameter, alive as long as the unit,
    whose storage is a part of `full`. Freeing resizes that storage to 0 bytes and gathering resizes it back, so that graphs
    which saved a leaf in forward read the values that are gathered again for backward.

    [Note: version counters] A tensor saved by autograd remembers its version, and an in-place write raises it. A gather must
    not: it restores the values that were saved. Each leaf is therefore made from a `.data` of its own, which aliases
    the storage but not the version counter, and the gather writes through `full` and `_targets`. A user's in-place
    write to a leaf still counts.

    Attributes:
        full: shape (unsharded_numel,).
        leaves: the unsharded parameters, in the layout's order.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device, world_size: int) -> None:
        self.layout = layout
        self._world_size = world_size
        self.full = torch.empty(layout.unsharded_numel, dtype=dtype, device=device)
        self._num_bytes = self.full.nbytes
        self.leaves = [
            nn.Parameter(view, requires_grad=spec.requires_grad)
            for spec, view in zip(layout.params, self._views(), strict=True)
        ]
        self._targets = self._columns()
        self._landing: Tensor | None = None
        self._work: Work | None = None
        self.free()

    def start(self, shard: Tensor, communicator: Communicator, *, unit: str, phase: str) -> None:
        """Allocate and issue the all-gather; the leaves may be read after `finish`."""
        shard = shard.detach()
        if shard.dtype != self.full.dtype:
            shard = shard.to(self.full.dtype)
        if self.layout.contiguous:
            gathered = self.full
            self.full.untyped_storage().resize_(self._num_bytes)
        else:
            gathered = self._landing = torch.empty(self.layout.gathered_numel, dtype=shard.dtype, device=shard.device)
        self._work = communicator.all_gather(gathered, shard, unit=unit, phase=phase)

    def finish(self) -> None:
        """Wait for the all-gather and put every parameter in its place."""
        self._wait()
        if self._landing is not None:
            self.full.untyped_storage().resize_(self._num_bytes)
            table = self._landing.view(self._world_size, -1)
            widths = [column.width for column in self.layout.columns]
            torch.split_with_sizes_copy(table, widths, dim=1, out=self._targets)
            self._landing = None

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def free(self) -> None:
        """Give the memory back. The leaves keep their shapes and hold nothing."""
        self._wait()
        self._landing = None
        storage = self.full.untyped_storage()
        if storage.resizable():
            storage.resize_(0)
        else:
            self._replace()

    def realias(self) -> None:
        """Point every leaf at `full` again, whatever data a user who was shown them gave them instead."""
        for leaf, view in zip(self.leaves, self._views(), strict=True):
            leaf.data = view

    def _replace(self) -> None:
        """Leave the memory to a numpy array that the user made of a leaf, which pins it, and go on with other memory."""
        self.full = torch.empty_like(self.full)
        self.realias()
        self._targets = self._columns()
        self.full.untyped_storage().resize_(0)

    def _views(self) -> list[Tensor]:
        """Each parameter in `full`, with a version counter of its own."""
        return [
            self.full.data[start : start + spec.numel].view(spec.shape)
            for spec, start in zip(self.layout.params, self.layout.offsets, strict=True)
        ]

    def _columns(self) -> list[Tensor]:
        """Where a column of the gathered buffer is copied out to, for a layout that needs it: (world_size, width) each."""
        if self.layout.contiguous:
            return []
        return [
            self.full.data[start : start + column.width * self._world_size].view(self._world_size, column.width)
            for column, start in zip(self.layout.columns, self.layout.offsets, strict=True)
        ]
