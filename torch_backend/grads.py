"""GradStore: from the full gradients of one rank to the sharded mean gradient of all."""

from collections.abc import Sequence

import torch
from torch import Tensor

from crossframe import reduction
from crossframe.layout import Layout
from torch_backend.collectives import Communicator, Work, dtype_name


class GradStore:
    """The gradients of one bucket on their way (R26, R33).

    The order of operations is part of the result: cast to the reduction's dtype, divide, sum between ranks, divide, cast to the
    stored dtype.
    """

    def __init__(self, layout: Layout, stored: torch.dtype, reduced: torch.dtype, *, divides_once: bool) -> None:
        self.layout = layout
        self._stored = stored
        self._reduced = reduced
        self._divides_once = divides_once
        self._work: Work | None = None
        self._full: Tensor | None = None
        self._shard: Tensor | None = None
        self._divide_after = 1.0

    @property
    def pending(self) -> bool:
        """Whether a reduction was started and not finished."""
        return self._work is not None

    def start(self, grads: Sequence[Tensor | None], communicator: Communicator, *, unit: str) -> None:
        """Issue the reduction of this rank's full gradients, in the layout's order; None counts as zeros (R29)."""
        factors = self._factors(communicator.size)
        full = self._collect(grads)
        if factors.before != 1:
            full.div_(factors.before)
        self._divide_after = factors.after
        # Kept until `finish`: the collective reads one and writes the other.
        self._full, self._shard = full, full.new_empty(self.layout.padded_shard_numel)
        self._work = communicator.reduce_scatter(self._shard, full, unit=unit, phase="backward")

    def finish(self) -> Tensor:
        """Wait for the reduction. Returns this rank's gradient, of shape (padded_shard_numel,), in the stored dtype."""
        assert self._work is not None and self._shard is not None
        self._work.wait()
        shard = self._shard
        self._work = self._full = self._shard = None
        if self._divide_after != 1:
            shard.div_(self._divide_after)
        return shard.to(self._stored)

    def abandon(self) -> None:
        """Let go of a reduction that failed."""
        self._work = self._full = self._shard = None

    def _factors(self, num_ranks: int) -> reduction.DivideFactors:
        if self._divides_once:
            return reduction.mean_factors(num_ranks, dtype_name(self._reduced))
        return reduction.divide_factors(num_ranks)

    def _collect(self, grads: Sequence[Tensor | None]) -> Tensor:
        """One buffer of gathered_numel elements, laid out like the gathered parameters, zero wherever there is no
        gradient."""
        layout = self.layout
        some = next(grad for grad in grads if grad is not None)
        zeros = some.new_zeros
        if not layout.contiguous:
            full = some.new_empty((layout.world_size, layout.padded_shard_numel), dtype=self._reduced)
            present = [zeros(p.shape) if g is None else g for p, g in zip(layout.params, grads, strict=True)]
            if some.dtype == self._reduced:
                torch.ops.aten._chunk_cat(present, dim=0, num_chunks=layout.world_size, out=full)
            else:
                full.copy_(torch.ops.aten._chunk_cat(present, dim=0, num_chunks=layout.world_size))
            return full.view(-1)
        parts, end = [], 0
        for spec, start, grad in zip(layout.params, layout.offsets, grads, strict=True):
            if end < start:
                parts.append(zeros(start - end))
            parts.append(zeros(spec.numel) if grad is None else grad.reshape(-1))
            end = start + spec.numel
        if end < layout.gathered_numel:
            parts.append(zeros(layout.gathered_numel - end))
        return torch.cat(parts).to(self._reduced)
