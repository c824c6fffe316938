"""ShardStore: one rank's shard of a bucket, in one buffer that the store owns (pinned if it is offloaded)."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crossframe.errors import ParamError, UnsupportedError
from crossframe.layout import Layout, Padding, Piece
from crossframe.writeback import check_full, check_replaced
from torch_backend.compat._dtypes import dtype_name
from torch_backend.memory._gather import GatherBuffer
from torch_backend.memory._streams import Streams


class ShardStore:
    """One rank's shard, which is the input of the all-gather and which the optimizer updates.

    Attributes:
        rank: this rank's index in the shard group.
        buffer: shape (padded_shard_numel,), with the layout's padding (R05).
        pieces: for each parameter, a 1-D view of the elements that this rank owns, possibly empty.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        full: Sequence[Tensor],
        device: torch.device | None = None,
        *,
        pinned: bool = False,
    ) -> None:
        """
        Args:
            full: the full parameters, in the layout's order.
            device: the device of the shard. None: that of the parameters.
            pinned: use pinned memory, from which copies to an accelerator do not block the host.
        """
        self.layout, self.rank = layout, rank
        self._cuts = cuts_of(layout, rank)
        device = full[0].device if device is None else device
        with torch.no_grad():
            self.buffer = torch.empty(layout.padded_shard_numel, dtype=full[0].dtype, device=device, pin_memory=pinned)
            for run in self._cuts.padding:
                self.buffer[run.start : run.stop] = run.fill
            self.cut()
            self.write(full)

    def cut(self) -> None:
        """Recreate `pieces` after `buffer` was replaced."""
        self.pieces = self.split(self.buffer)

    def holds(self, i: int, local: Tensor) -> bool:
        """Whether `local` is the memory of piece i."""
        piece = self.pieces[i]
        return local.data_ptr() == piece.data_ptr() or not piece.numel()

    def check_extended(self, i: int) -> None:
        """Raise UnsupportedError because parameter i became an extension after it was sharded as a plain tensor."""
        raise UnsupportedError(
            f"parameter {self.layout.params[i].name!r}, rank {self.rank}: its local tensor gained a method "
            "fsdp_pre_all_gather after it was sharded; make the parameter a tensor subclass with that method before "
            "fully_shard"
        )

    def take(self, i: int, value: Tensor, shape: tuple[int, ...]) -> None:
        """Copy the user's replacement of piece i, which has this shape (R25).

        Raises:
            ParamError: another shape, dtype or device.
        """
        copy_into(self.pieces[i], value, self.layout.params[i].name, self.rank, shape)

    def gather_buffer(
        self, dtype: torch.dtype, device: torch.device, streams: Streams, *, limited: bool
    ) -> GatherBuffer:
        """Create the memory of the unsharded parameters, in the compute dtype and on the compute device."""
        return GatherBuffer(self.layout, dtype, device, streams, shard=self.buffer, limited=limited)

    def write(self, full: Sequence[Tensor]) -> None:
        """Copy this rank's slices of the full parameters, in the layout's order (R20).

        Raises:
            ParamError: a parameter of another shape.
        """
        # Check all parameters first, owned or not, so that an error changes nothing and occurs on all ranks.
        for spec, value in zip(self.layout.params, full, strict=True):
            check_full(spec, tuple(value.shape))
        with torch.no_grad():
            for i, place in self._cuts.copies:
                self._copy(i, place, full[i])

    def write_one(self, i: int, full: Tensor) -> None:
        """Copy this rank's slice of one parameter."""
        with torch.no_grad():
            for at, place in self._cuts.copies:
                if at == i:
                    self._copy(i, place, full)

    def _copy(self, i: int, place: Piece, full: Tensor) -> None:
        piece, value = self.pieces[i], _elements(full, place)
        if value.data_ptr() != piece.data_ptr():  # without sharding, it may be the piece itself
            (piece if place.num_runs == 1 else piece.view(value.shape)).copy_(value)

    def slices(self, full: Sequence[Tensor | None]) -> list[Tensor | None]:
        """This rank's 1-D slice of each full tensor; None if the tensor is None or the rank owns none of it."""
        found: list[Tensor | None] = [None] * len(full)
        for i, place in self._cuts.copies:
            value = full[i]
            if value is not None:
                found[i] = _elements(value, place).reshape(-1)
        return found

    def split(self, shard: Tensor) -> list[Tensor]:
        """View each parameter's piece in another buffer with this layout, such as a sharded gradient."""
        return self._cuts.split(shard)

    def join(self, pieces: Mapping[int, Tensor], line: Tensor) -> Tensor:
        """The inverse of `split`: fill a buffer with these pieces (by parameter index), zero elsewhere, and return it."""
        return self._cuts.join(pieces, line)


@dataclass(frozen=True)
class _Cuts:
    """The division of a rank's shard into pieces and padding, with an empty part at its end.

    The copies are those of `crossframe.writeback.writeback_copies`, of which all runs of a piece are one strided copy here.

    Attributes:
        copies: the parameter index and range of each piece.
        padding: the ranges of padding.
        widths, places: the width of each part, and the part of each parameter.
    """

    copies: Sequence[tuple[int, Piece]]
    padding: Sequence[Padding]
    widths: list[int]
    places: Sequence[int]

    def split(self, line: Tensor) -> list[Tensor]:
        """View each parameter's piece in a buffer with this layout."""
        parts = torch.split_with_sizes(line, self.widths)
        return [parts[at] for at in self.places]

    def join(self, pieces: Mapping[int, Tensor], line: Tensor) -> Tensor:
        """Fill a buffer with these pieces (by parameter index), zero elsewhere, and return it."""
        parts = torch.split_with_sizes(line, self.widths)
        copied = {self.places[i]: piece for i, piece in pieces.items()}
        for at, part in enumerate(parts):
            if at in copied:
                part.copy_(copied[at].detach().reshape(-1))
            else:
                part.zero_()
        return line


@functools.lru_cache(maxsize=64)
def cuts_of(layout: Layout, rank: int) -> _Cuts:
    index = {spec.name: i for i, spec in enumerate(layout.params)}
    copies = [(index[piece.name], piece) for piece in layout.pieces(rank)]
    widths, end = [], 0
    places = [-1] * len(layout.params)
    for i, piece in sorted(copies, key=lambda copy: copy[1].shard_start):
        if end < piece.shard_start:
            widths.append(piece.shard_start - end)
        places[i] = len(widths)
        widths.append(piece.numel)
        end = piece.shard_stop
    return _Cuts(copies, layout.padding(rank), [*widths, layout.padded_shard_numel - end, 0], places)


def _elements(full: Tensor, piece: Piece) -> Tensor:
    """View the elements of a piece in a full parameter: 1-D, or (num_runs, run_numel)."""
    line = full.reshape(-1)
    if piece.num_runs == 1:
        return line[piece.param_start : piece.param_stop]
    return line.as_strided(
        (piece.num_runs, piece.run_numel), (piece.stride, 1), line.storage_offset() + piece.param_start
    )


def copy_into(piece: Tensor, value: Tensor, name: str, rank: int, shape: tuple[int, ...]) -> None:
    """Copy a sharded parameter's new data into the shard; ParamError for another shape, dtype or device (R25)."""
    check_replaced(name, rank, (shape, dtype_name(piece.dtype)), (tuple(value.shape), dtype_name(value.dtype)))
    if value.device != piece.device:
        raise ParamError(
            f"parameter {name!r}, rank {rank}: expected it on {piece.device}, as it was sharded, got {value.device}; "
            "move the module before sharding it"
        )
    with torch.no_grad():
        piece.view(shape).copy_(value)
