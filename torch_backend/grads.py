"""GradStore: from the full gradients of one rank to the sharded mean gradient of all."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from crossframe.faces import Face
from crossframe.layout import Layout
from crossframe.precision import Precision
from crossframe.reduction import ReductionStep, factors_of, reduction_steps
from torch_backend.collectives import UnitMesh
from torch_backend.comm_hook import CommHook
from torch_backend.dtypes import torch_dtype
from torch_backend.streams import Streams


class GradStore:
    """The gradients of one bucket on their way, through the steps that the core lists (R26, R28, R33).

    Attributes:
        arrived: this rank's reduced gradient, of shape (padded_shard_numel,), in the dtype that is kept, once `advance` has
            come to its end.
    """

    def __init__(self, layout: Layout, precision: Precision, face: Face, mesh: UnitMesh, streams: Streams) -> None:
        self.layout = layout
        self._mesh, self._streams = mesh, streams
        self._reduced, self._kept = torch_dtype(precision.reduced), torch_dtype(precision.kept)
        self._steps = reduction_steps(mesh.spec, face)
        self._factors = factors_of(mesh.spec, face, precision.reduced)
        self._under_way: Iterator[None] | None = None
        self.arrived: Tensor | None = None

    def start(self, grads: Sequence[Tensor | None], *, unit: str, hook: CommHook | None) -> None:
        """Issue the first collective of the reduction of this rank's full gradients, in the layout's order; None counts as zeros
        (R29)."""
        self._streams.before_collect()
        full = self._collect(grads, cast=hook is None or not hook.casts)
        self._streams.begin_reduction(full)
        self._under_way = self._reduce(full, unit) if hook is None else self._call(hook, full)
        self.advance()
        while self._streams.queues and self._under_way is not None:
            self.advance()
        self._streams.reduction_read()

    def advance(self) -> bool:
        """Wait for the collective that is under way and issue the next. Returns whether there was none."""
        with self._streams.reducing():
            if self._under_way is not None and next(self._under_way, self) is self:
                self._under_way = None
        return self._under_way is None

    def take(self) -> Tensor:
        """The reduced gradient, which is forgotten here."""
        assert self.arrived is not None
        shard, self.arrived = self.arrived, None
        return shard

    def abandon(self) -> None:
        """Let go of a reduction that failed."""
        self._under_way = self.arrived = None

    def _reduce(self, value: Tensor, unit: str) -> Iterator[None]:
        """The core's steps. Between two of them, wherever one waits for other ranks, the host may do something else."""
        step, factors = ReductionStep, self._factors
        for this in self._steps:
            if this is step.DIVIDE_BEFORE:
                _divide(value, factors.before)
            elif this is step.REDUCE_SCATTER:
                shard = value.new_empty(self.layout.padded_shard_numel)
                work = self._mesh.shards.reduce_scatter(shard, value, unit=unit, phase="backward")
                yield
                work.wait()
                value = shard
            elif this is step.DIVIDE_BETWEEN:
                _divide(value, factors.between)
            elif this is step.ALL_REDUCE:
                work = self._mesh.replicas.all_reduce(value, unit=unit, phase="backward")
                yield
                work.wait()
            elif this is step.DIVIDE_AFTER:
                _divide(value, factors.after)
            elif this is step.CAST_TO_KEPT:
                self.arrived = value.to(self._kept)

    def _call(self, hook: CommHook, full: Tensor) -> Iterator[None]:
        if self._mesh.spec.shard == 1:
            shard = full
            hook.hook(hook.state, full)
        else:
            shard = full.new_empty(self.layout.padded_shard_numel)
            hook.hook(hook.state, full, shard)
        self.arrived = shard.to(self._kept)
        yield

    def _collect(self, grads: Sequence[Tensor | None], *, cast: bool) -> Tensor:
        """One buffer of gathered_numel elements, laid out like the gathered parameters, zero wherever there is no
        gradient."""
        layout = self.layout
        some = next(grad for grad in grads if grad is not None)
        dtype, zeros = self._reduced if cast else some.dtype, some.new_zeros
        if not layout.contiguous:
            full = some.new_empty((layout.world_size, layout.padded_shard_numel), dtype=dtype)
            present = [zeros(p.shape) if g is None else g for p, g in zip(layout.params, grads, strict=True)]
            if some.dtype == dtype:
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
        return torch.cat(parts).to(dtype)


def _divide(value: Tensor, factor: float) -> None:
    if factor != 1:
        value.div_(factor)
