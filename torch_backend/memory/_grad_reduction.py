"""GradStore: reduces unsharded gradients to the sharded mean: a reduce-scatter or a hook, then an all-reduce over replicas."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import torch
from torch import Tensor

from crossframe.api import Api
from crossframe.layout import Column, Layout, PerParamLayout
from crossframe.layout.line import LineLayout
from crossframe.precision import Precision
from crossframe.reduction import ReductionStep, factors_of, reduction_steps
from torch_backend.compat._dtypes import torch_dtype
from torch_backend.memory._gather import rows_of
from torch_backend.memory._streams import Streams
from torch_backend.ranks._collectives import UnitMesh
from torch_backend.ranks._comm_hook import CommHook

# Calling it through torch.ops takes three times as long.
_chunk_cat: Callable[..., Tensor] = torch._chunk_cat  # type: ignore[attr-defined]


@dataclass
class ReductionChoices:
    """The user's options for reducing the gradients of a bucket, which may change between steps.

    Attributes:
        divide_factor: divisor instead of the number of ranks (R27).
        sum_only: whether all division follows the collectives.
        all_reduce_hook: called with this rank's 1-D reduced gradient after the last collective and before a remaining division.
    """

    divide_factor: float | None = None
    sum_only: bool = False
    all_reduce_hook: Callable[[Tensor], Any] | None = None


class GradStore:
    """The reduction of one bucket's gradients, in the steps that the core lists (R26, R28, R33).

    Attributes:
        arrived: this rank's reduced gradient, of shape (padded_shard_numel,), once `advance` has finished.
        partial: the gradients of earlier microbatches, summed over the shard group but not over the replicas (R28).
    """

    def __init__(
        self,
        layout: Layout,
        precision: Precision,
        api: Api,
        mesh: UnitMesh,
        streams: Streams,
        choices: ReductionChoices,
    ) -> None:
        self.layout = layout
        self._mesh, self._streams, self._choices, self._api = mesh, streams, choices, api
        self._reduced, self._stored = torch_dtype(precision.reduced), torch_dtype(precision.stored)
        self._reduced_name = precision.reduced
        self._steps = reduction_steps(mesh.spec, api)
        self._steps_to_partial = self._steps
        if api is Api.FSDP2 and mesh.spec.replicate > 1:
            self._steps_to_partial = reduction_steps(mesh.spec, api, all_reduce=False)
        self._factors = factors_of(mesh.spec, api, precision.reduced)
        self._under_way: Iterator[None] | None = None
        self.arrived: Tensor | None = None
        self.partial: Tensor | None = None

    def start(
        self,
        grads: Sequence[Tensor | None],
        layout: Layout,
        *,
        unit: str,
        hook: CommHook | None,
        all_reduce: bool = True,
    ) -> None:
        """Issue the first collective of the reduction of unsharded gradients, in the layout's order; None means zeros (R29).

        Args:
            layout: the core's `reduced_layout`, whose parameters have these gradients.
            all_reduce: whether to also sum over the replicas; if not, a later reduction does.
        """
        self._streams.before_collect()
        full = self._collect(grads, layout, cast=hook is None or not hook.casts)
        self._streams.begin_reduction(full)
        steps = self._steps if all_reduce else self._steps_to_partial
        self._under_way = self._reduce(full, layout, unit, steps) if hook is None else self._call(hook, full)
        self.advance()
        while self._streams.queues and self._under_way is not None:
            self.advance()
        self._streams.reduction_read()

    def advance(self) -> bool:
        """Wait for the pending collective and issue the next one. Returns whether the reduction has finished."""
        if self._under_way is not None:
            with self._streams.reducing():
                try:
                    next(self._under_way)
                except StopIteration:
                    self._under_way = None
        return self._under_way is None

    def take(self) -> Tensor:
        """Return and clear the reduced gradient."""
        assert self.arrived is not None
        shard, self.arrived = self.arrived, None
        return shard

    def abandon(self) -> None:
        """Discard a failed reduction and partial sums of earlier ones."""
        self._under_way = self.arrived = self.partial = None

    def _reduce(self, value: Tensor, layout: Layout, unit: str, steps: Sequence[ReductionStep]) -> Iterator[None]:
        """Execute the core's steps. Yields after issuing each collective, so that the host can continue."""
        factors, choices = self._factors, self._choices
        if choices.divide_factor is not None or choices.sum_only:
            factors = factors_of(
                self._mesh.spec, self._api, self._reduced_name, choices.divide_factor, sum_only=choices.sum_only
            )
        for this in steps:
            match this:
                case ReductionStep.CAST_TO_REDUCED:
                    assert value.dtype == self._reduced  # `_collect` has cast
                case ReductionStep.DIVIDE_BEFORE:
                    _divide(value, factors.before)
                case ReductionStep.REDUCE_SCATTER:
                    group = self._mesh.reducing
                    shard = group.allocate_reduced(layout.padded_shard_numel, value)
                    work = group.reduce_scatter(shard, value, unit=unit, phase="backward")
                    yield
                    work.wait()
                    value = shard
                case ReductionStep.DIVIDE_BETWEEN:
                    _divide(value, factors.between)
                case ReductionStep.ADD_PARTIAL:
                    if self.partial is not None:
                        value.add_(self.partial)
                        self.partial = None
                case ReductionStep.KEEP_PARTIAL:
                    self.partial = value
                case ReductionStep.ALL_REDUCE:
                    work = self._mesh.replicas.all_reduce(value, unit=unit, phase="backward")
                    yield
                    work.wait()
                case ReductionStep.DIVIDE_AFTER:
                    hook = choices.all_reduce_hook
                    if hook is not None and not factors.averaged:
                        hook(value)
                    _divide(value, factors.after)
                    if hook is not None and factors.averaged:
                        hook(value)
                case ReductionStep.CAST_TO_STORED:
                    if value.dtype != self._stored:
                        value = value.to(self._stored)
                case ReductionStep.ACCUMULATE:
                    self.arrived = value  # the bucket adds it to the gradients that the user's parameters have
                case _:
                    assert_never(this)

    def _call(self, hook: CommHook, full: Tensor) -> Iterator[None]:
        if self._mesh.spec.shard == 1:
            shard = full
            hook.hook(hook.state, full)
        else:
            shard = full.new_empty(self.layout.padded_shard_numel)
            hook.hook(hook.state, full, shard)
        self.arrived = shard.to(self._stored)
        yield

    def _collect(self, grads: Sequence[Tensor | None], layout: Layout, *, cast: bool) -> Tensor:
        """A buffer of gathered_numel elements with the layout of the gathered parameters, zero without a gradient."""
        some = next(grad for grad in grads if grad is not None)
        dtype, zeros = self._reduced if cast else some.dtype, some.new_zeros
        if isinstance(layout, PerParamLayout):
            full = self._mesh.reducing.allocate_reduced(layout.gathered_numel, some, dtype)
            table = full.view(layout.world_size, layout.padded_shard_numel)
            # Parameters without elements have no column, and _chunk_cat rejects them.
            filled = layout.filled
            present = [zeros(layout.params[i].shape) if grads[i] is None else grads[i] for i in filled]
            if not present:
                pass
            elif layout.on_dim_0:
                _chunk_cat(present, 0, layout.world_size, out=table)  # also casts
            else:
                for i, grad in zip(filled, present, strict=True):
                    column = layout.columns[i]
                    part = table[:, column.start : column.start + column.width]
                    _put(part, grad, layout.params[i].shape, column)  # type: ignore[arg-type]
            return full
        assert isinstance(layout, LineLayout)
        parts = []
        for i, (space, grad) in enumerate(zip(layout.spaces, grads, strict=False)):
            if space:
                parts.append(zeros(space))
            parts.append(zeros(layout.params[i].numel) if grad is None else grad.reshape(-1))
        if layout.spaces[-1]:
            parts.append(zeros(layout.spaces[-1]))
        if dtype == some.dtype:  # `out` takes twice as long
            return torch.cat(parts)
        return torch.cat(parts, out=some.new_empty(layout.gathered_numel, dtype=dtype))


def _put(target: Tensor, grad: Tensor, shape: tuple[int, ...], column: Column) -> None:
    """Copy a full gradient into its column of the table of all ranks' shards, of shape (world_size, width)."""
    size = target.shape[0]
    if column.dim:
        rows = rows_of(grad.contiguous(), shape, column, size)
        target.view(rows.shape).copy_(rows)
    else:
        _chunk_cat([grad], 0, size, out=target)


def _divide(value: Tensor, factor: float) -> None:
    if factor != 1:
        value.div_(_divisor(factor, value.dtype))


@functools.lru_cache(maxsize=64)
def _divisor(factor: float, dtype: torch.dtype) -> Tensor:
    """The factor as a tensor without dims, by which a division takes half as long as by a number, with the same bits: in the
    dividend's dtype, which halves it again, if that holds the factor exactly."""
    same = torch.tensor(factor, dtype=dtype)
    return same if same.item() == factor else torch.tensor(factor, dtype=torch.float64)
