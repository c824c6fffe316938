"""GatherBuffer: the memory of a bucket's full parameters, and the parameters that alias it."""

from contextlib import suppress

import torch
from torch import Tensor, nn

from crossframe.errors import CollectiveError
from crossframe.layout import Layout
from torch_backend.collectives import Communicator, Work
from torch_backend.streams import Streams


class GatherBuffer:
    """Full parameters, allocated while a unit is unsharded and freed otherwise.

    [Note: leaves that alias] Autograd sees `leaves`: one nn.Parameter an original parameter, alive as long as the unit,
    whose storage is a part of `full`. Freeing resizes that storage to 0 bytes and gathering resizes it back, so that graphs
    which saved a leaf in forward read the values that are gathered again for backward.

    [Note: version counters] A tensor saved by autograd remembers its version, and an in-place write raises it. A gather must
    not: it restores the values that were saved. Each leaf is therefore made from a `.data` of its own, which aliases
    the storage but not the version counter, and the gather writes through `full` and `_targets`. A user's in-place
    write to a leaf still counts.

    [Note: the shard itself] Where nothing is sharded, cast or moved, the shard is the full parameters. Then `full` is the shard's
    own buffer, nothing is ever gathered or freed, and whatever is written is the truth (R14, R20).

    Attributes:
        full: shape (unsharded_numel,), on the device and in the dtype of compute.
        leaves: the unsharded parameters, in the layout's order.
        is_shard: see [Note: the shard itself].
    """

    def __init__(
        self,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        streams: Streams,
        *,
        shard: Tensor,
        limited: bool = True,
    ) -> None:
        """
        Args:
            shard: what will be gathered.
            limited: see `limit_all_gathers` in [Note: streams].
        """
        self.layout = layout
        self._streams, self._limited = streams, limited
        self._converts = dtype != shard.dtype or device != shard.device
        self.is_shard = layout.world_size == 1 and layout.contiguous and not self._converts
        self.full = shard if self.is_shard else torch.empty(layout.unsharded_numel, dtype=dtype, device=device)
        self._num_bytes = self.full.nbytes
        self.leaves = [
            nn.Parameter(view, requires_grad=spec.requires_grad)
            for spec, view in zip(layout.params, self.views(), strict=True)
        ]
        self._targets = self._columns()
        self._widths = [] if layout.contiguous else [column.width for column in layout.columns]
        self._landing: Tensor | None = None
        self._sent: Tensor | None = None
        self._work: Work | None = None
        self.free()

    def start(self, shard: Tensor, communicator: Communicator, *, unit: str, phase: str) -> None:
        """Allocate and issue the all-gather; the leaves may be read after `finish`."""
        if self.is_shard:
            return
        self._streams.before_gather()
        with self._streams.unsharding():
            shard = shard.detach()
            if self._converts:
                # Moved first: a copy that casts as well is cast by the host, which waits for it.
                shard = shard.to(self.full.device, non_blocking=True).to(self.full.dtype)
            if self.layout.contiguous:
                gathered = self.full
                self.full.untyped_storage().resize_(self._num_bytes)
            else:
                gathered = self._landing = shard.new_empty(self.layout.gathered_numel)
            self._sent = shard
            self._work = self._streams.settle(communicator.all_gather(gathered, shard, unit=unit, phase=phase))

    def finish(self) -> None:
        """Wait for the all-gather and put every parameter in its place."""
        self._wait()
        if self._landing is not None:
            self.full.untyped_storage().resize_(self._num_bytes)
            table = self._landing.view(self.layout.world_size, -1)
            torch.split_with_sizes_copy(table, self._widths, dim=1, out=self._targets)
            self._streams.before_free(self._landing, limited=self._limited)
            self._landing = None

    def _wait(self) -> None:
        if self._work is not None:
            work, self._work = self._work, None
            work.wait()
            self._sent = None

    def free(self) -> None:
        """Give the memory back. The leaves keep their shapes and hold nothing."""
        if self.is_shard:
            return
        with suppress(CollectiveError):  # who waited for it has been told
            self._wait()
        self._landing = self._sent = None
        self._streams.before_free(self.full, limited=self._limited)
        storage = self.full.untyped_storage()
        if storage.resizable():
            storage.resize_(0)
        else:
            self._replace()

    def _replace(self) -> None:
        """Leave the memory to a numpy array that the user made of a leaf, which pins it, and go on with other memory."""
        self.full = torch.empty_like(self.full)
        for leaf, view in zip(self.leaves, self.views(), strict=True):
            leaf.data = view
        self._targets = self._columns()
        self.full.untyped_storage().resize_(0)

    def views(self) -> list[Tensor]:
        """Each parameter in `full`, with a version counter of its own."""
        return views_of(self.layout, self.full)

    def _columns(self) -> list[Tensor]:
        """Where a column of the gathered buffer is copied out to, for a layout that needs it: (world_size, width) each."""
        size = self.layout.world_size
        if self.layout.contiguous:
            return []
        return [
            self.full.data[start : start + column.width * size].view(size, column.width)
            for column, start in zip(self.layout.columns, self.layout.offsets, strict=True)
        ]


def views_of(layout: Layout, full: Tensor) -> list[Tensor]:
    """Each parameter in a buffer of `unsharded_numel` elements, in its shape, with a version counter of its own."""
    return [
        full.data[start : start + spec.numel].view(spec.shape)
        for spec, start in zip(layout.params, layout.offsets, strict=True)
    ]
