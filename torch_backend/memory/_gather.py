"""GatherBuffer: the memory of a bucket's unsharded parameters, and the parameters that alias it."""

import math
from contextlib import suppress

import torch
from torch import Tensor, nn

from crossframe.errors import CollectiveError
from crossframe.layout import Column, Layout
from crossframe.unshard import shard_is_full
from torch_backend.memory._offload import to_compute
from torch_backend.memory._streams import Streams
from torch_backend.ranks._collectives import Communicator, Done, Work


class GatherBuffer:
    """The unsharded parameters of a bucket, allocated while its unit is unsharded.

    [Note: leaves that alias] Autograd sees `leaves`: one nn.Parameter per original parameter, with the lifetime of the unit,
    whose storage is a part of `full`. Freeing resizes the storage to 0 bytes and an all-gather resizes it back, so that graphs
    that saved a leaf in forward read the values that are all-gathered again for backward.

    [Note: version counters] Autograd saves the version of a tensor, and an in-place write increments it. An all-gather must not
    increment it because it restores the saved values. So each leaf is made from its own `.data`, which aliases the storage but
    not the version counter, and the all-gather writes through `full` and `_places`. A user's in-place write to a leaf still
    increments it.

    [Note: the shard itself] If a flat layout is not sharded, cast or moved, the shard equals the unsharded parameters. Then
    `full` is the shard's buffer, nothing is all-gathered or freed, and all writes persist (R14, R20).

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
            shard: the store whose shards are all-gathered.
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
            layout: the layout of the shard, if it is of a reshard group (R08).
        """
        if self.is_shard:
            return
        layout = self.layout if layout is None else layout
        self._streams.before_gather()
        with self._streams.unsharding():
            if communicator.size == 1 and layout.contiguous:
                self.full.untyped_storage().resize_(self._num_bytes)
                self.full.copy_(shard)
                self._work = self._streams.settle(Done())
                return
            if (self._converts and shard.dtype != self.full.dtype) or shard.device != self.full.device:
                shard = to_compute(shard, self.full)
            self._sent = shard
            if layout.contiguous:
                self.full.untyped_storage().resize_(self._num_bytes)
                gathered = self.full
            elif communicator.size == 1:  # each parameter is copied out
                self._landing, self._landed = shard, layout
                return
            else:
                gathered = communicator.allocate_gathered(layout.gathered_numel, shard)
                self._landing, self._landed = gathered, layout
            self._work = self._streams.settle(communicator.all_gather(gathered, shard, unit=unit, phase=phase))

    def finish(self) -> bool:
        """Wait for the all-gather and copy each parameter out. Returns whether leaves are new objects: always False."""
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
        """Free the memory. The leaves keep their shapes."""
        if self.is_shard:
            return
        with suppress(CollectiveError):  # already raised where it was waited for
            self._wait()
        self._landing = self._sent = None
        self._streams.before_free(self.full, limited=self._limited)
        storage = self.full.untyped_storage()
        if storage.resizable():
            storage.resize_(0)
        else:
            self._replace()

    def _replace(self) -> None:
        """Abandon memory that is pinned by a user's numpy array of a leaf, and use new memory from now on."""
        self.full = torch.empty_like(self.full)
        for leaf, view in zip(self.leaves, self.views(), strict=True):
            leaf.data = view
        self._places.clear()
        self.full.untyped_storage().resize_(0)

    def views(self) -> list[Tensor]:
        """A view of each parameter in `full`, with its own version counter."""
        return views_of(self.layout, self.full)


class _Places:
    """The copy-out of a gathered buffer's columns.

    Attributes:
        widths: widths of the columns.
        targets: destination of each column, of shape (world_size, width), or (world_size, num_rows, run) for a parameter sharded
            on a dim above 0.
        on_dim_0: whether all parameters are sharded on dim 0.
    """

    def __init__(self, full: Tensor, at: Layout, layout: Layout) -> None:
        """
        Args:
            full: memory of the unsharded parameters, with the layout `at`.
            layout: of the shards, over the ranks of `at` or a divisor of their number, which needs no more memory.
        """
        size, columns = layout.world_size, layout.columns
        self.widths = [column.width for column in columns]
        self.on_dim_0 = all(column.dim == 0 for column in columns)
        self.targets = [
            rows_of(full[start : start + column.width * size], spec.shape, column, size)
            for column, spec, start in zip(columns, layout.params, at.offsets, strict=True)
        ]


def rows_of(param: Tensor, shape: tuple[int, ...], column: Column, size: int) -> Tensor:
    """View a parameter's contiguous memory by rank: (size, width), or (size, num_rows, run) if it is sharded on a dim above 0."""
    if column.dim == 0:
        return param.view(size, column.width)
    num_rows = math.prod(shape[: column.dim])
    run = column.width // num_rows if num_rows else 0
    return param.view(num_rows, size, run).transpose(0, 1)


def views_of(layout: Layout, full: Tensor) -> list[Tensor]:
    """View each parameter in a buffer of `unsharded_numel` elements, with its own version counter."""
    return [
        full.data[start : start + spec.numel].view(spec.shape)
        for spec, start in zip(layout.params, layout.offsets, strict=True)
    ]


def with_own_storage(view: Tensor) -> Tensor:
    """View the same memory as a storage of its own, with offset 0. PyTorch can only copy DTensors of such tensors, and would save
    the memory around other ones with them."""
    if type(view) is not Tensor or view.is_meta:
        return view
    start = view.storage_offset() * view.itemsize
    storage = view.untyped_storage()[start : start + view.nbytes]
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(storage, 0, view.shape)  # type: ignore[call-overload]
