"""GatherBuffer: the memory of a bucket's unsharded parameters, and the parameters that alias it."""

import math
from contextlib import suppress

import torch
from torch import Tensor, nn

from crossframe.errors import CollectiveError
from crossframe.layout import Column, Layout
from crossframe.unshard import shard_is_full
from torch_backend.memory._streams import Streams
from torch_backend.ranks._collectives import Communicator, Work


class GatherBuffer:
    """Full parameters, allocated while a unit is unsharded and freed otherwise.

    [Note: leaves that alias] Autograd sees `leaves`: one nn.Parameter an original parameter, alive as long as the unit,
    whose storage is a part of `full`. Freeing resizes that storage to 0 bytes and gathering resizes it back, so that graphs
    which saved a leaf in forward read the values that are gathered again for backward.

    [Note: version counters] A tensor saved by autograd remembers its version, and an in-place write raises it. A gather must
    not: it restores the values that were saved. Each leaf is therefore made from a `.data` of its own, which aliases
    the storage but not the version counter, and the gather writes through `full` and what is in `_places`. A user's in-place
    write to a leaf still counts.

    [Note: the shard itself] Where a line is not sharded, cast or moved, the shard is the full parameters. Then `full` is
    the shard's own buffer, nothing is ever gathered or freed, and whatever is written persists (R14, R20).

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
        cast, moved = dtype != shard.dtype, device != shard.device
        self._converts = cast or moved
        self.is_shard = shard_is_full(layout, cast=cast, moved=moved)
        self.full = shard if self.is_shard else torch.empty(layout.unsharded_numel, dtype=dtype, device=device)
        self._num_bytes = self.full.nbytes
        self.leaves = [
            nn.Parameter(view, requires_grad=spec.requires_grad)
            for spec, view in zip(layout.params, self.views(), strict=True)
        ]
        self._places: dict[int, _Places] = {}
        self._landing: Tensor | None = None
        self._landed = layout
        self._sent: Tensor | None = None
        self._work: Work | None = None
        self.free()

    def start(
        self, shard: Tensor, communicator: Communicator, *, unit: str, phase: str, layout: Layout | None = None
    ) -> None:
        """Allocate and issue the all-gather; the leaves may be read after `finish`.

        Args:
            layout: of the shard, if it is that of a smaller group (R08).
        """
        if self.is_shard:
            return
        layout = self.layout if layout is None else layout
        self._streams.before_gather()
        with self._streams.unsharding():
            shard = shard.detach()
            if (self._converts and shard.dtype != self.full.dtype) or shard.device != self.full.device:
                # Moved first: a copy that casts as well is cast by the host, which waits for it.
                shard = shard.to(self.full.device, non_blocking=True).to(self.full.dtype)
            self._sent = shard
            if layout.contiguous:
                self.full.untyped_storage().resize_(self._num_bytes)
                gathered = self.full
            elif communicator.size == 1:
                self._landing, self._landed = shard, layout
                return
            else:
                gathered = communicator.allocate_gathered(layout.gathered_numel, shard)
                self._landing, self._landed = gathered, layout
            self._work = self._streams.settle(communicator.all_gather(gathered, shard, unit=unit, phase=phase))

    def finish(self) -> bool:
        """Wait for the all-gather and put every parameter in its place. Returns whether other leaves are in use since: never."""
        self._wait()
        if self._landing is not None:
            self.full.untyped_storage().resize_(self._num_bytes)
            self._put(self._landing, self._landed)
            self._streams.before_free(self._landing, limited=self._limited)
            self._landing = self._sent = None
        return False

    def _put(self, gathered: Tensor, layout: Layout) -> None:
        places = self._places.get(layout.world_size)
        if places is None:
            places = self._places[layout.world_size] = _Places(self.full.data, self.layout, layout)
        table = gathered.view(layout.world_size, -1)
        if places.on_dim_0:
            torch.split_with_sizes_copy(table, places.widths, dim=1, out=places.targets)
        else:
            for column, target in zip(layout.columns, places.targets, strict=True):
                target.copy_(table[:, column.start : column.start + column.width].view(target.shape))

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
        self._places.clear()
        self.full.untyped_storage().resize_(0)

    def views(self) -> list[Tensor]:
        """Each parameter in `full`, with a version counter of its own."""
        return views_of(self.layout, self.full)


class _Places:
    """Where the columns of a gathered buffer are copied out to.

    Attributes:
        widths: of the columns.
        targets: (world_size, width) each; where a parameter is cut on a dim above 0, in rows: (world_size, num_rows, run).
        on_dim_0: whether all are of the first kind.
    """

    def __init__(self, full: Tensor, at: Layout, layout: Layout) -> None:
        """
        Args:
            full: memory of the unsharded parameters, laid out by `at`.
            layout: of the shards; over the ranks of `at`, or over a number that divides theirs, which needs no more room.
        """
        size, columns = layout.world_size, layout.columns
        self.widths = [column.width for column in columns]
        self.on_dim_0 = all(column.dim == 0 for column in columns)
        self.targets = [
            rows_of(full[start : start + column.width * size], spec.shape, column, size)
            for column, spec, start in zip(columns, layout.params, at.offsets, strict=True)
        ]


def rows_of(param: Tensor, shape: tuple[int, ...], column: Column, size: int) -> Tensor:
    """A parameter's contiguous memory as what each of `size` ranks has of it: (size, width), or where it is cut on a dim above
    0, (size, num_rows, run)."""
    if column.dim == 0:
        return param.view(size, column.width)
    num_rows = math.prod(shape[: column.dim])
    run = column.width // num_rows if num_rows else 0
    return param.view(num_rows, size, run).transpose(0, 1)


def views_of(layout: Layout, full: Tensor) -> list[Tensor]:
    """Each parameter in a buffer of `unsharded_numel` elements, in its shape, with a version counter of its own."""
    return [
        full.data[start : start + spec.numel].view(spec.shape)
        for spec, start in zip(layout.params, layout.offsets, strict=True)
    ]
