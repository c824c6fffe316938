"""The memory of one bucket on all ranks: full parameters, gradients and optimizer state."""

from collections.abc import Iterable, Sequence
from typing import assert_never

import numpy as np

from crossframe.api import Api
from crossframe.dtypes import numpy_dtype
from crossframe.errors import ParamError
from crossframe.layout import Layout, post_forward, post_forward_group, views
from crossframe.mesh import MeshSpec
from crossframe.plan import PlannedBucket
from crossframe.reduction import Missing, ReductionStep, factors_of, missing_grad
from crossframe.reference.collectives import all_gather, over_groups
from crossframe.reference.optim import Optimizer, State
from crossframe.reference.unit import Params, ReferenceUnit
from crossframe.unshard import AuthoritativeStorage, ExitStep, authoritative_storage, shard_is_full, shows_grad

Grads = dict[str, np.ndarray]


class LiveBucket:
    """The memory of one bucket. Lists have one item for each rank.

    Attributes:
        unit: the shards, which are the authoritative storage.
        full: gathered buffers of shape (full_layout.gathered_numel,), in the gathered dtype, or None.
        full_layout: the layout of `full`: that of the shards, or that of a reshard group (R08).
        parts: the part that each rank keeps in its reshard group, or None.
        grads: full gradients that are not reduced yet, by name.
        partials: sums over the shard group that wait for the sum over replicas (R28), or None.
        under_way: names of parameters that have a gradient on any rank in the current reduction.
        sharded_grads: reduced gradients of shape (padded_shard_numel,), or None if a rank has none.
        reached: names of parameters that have a reduced gradient.
        shown_grads: full gradients that are shown to the user, of shape (gathered_numel,), or None.
        shown_names: names of parameters whose gradient is shown.
        optimizer_state: optimizer state by name.
        steps: number of steps of each parameter, by name.
    """

    def __init__(self, planned: PlannedBucket, mesh: MeshSpec, params: Params, api: Api, fill: bool) -> None:
        self.unit = ReferenceUnit(planned.layout, params, fill=fill, mesh=mesh, precision=planned.precision)
        self.api = api
        self.layout: Layout = planned.layout
        self.full_layout: Layout = planned.layout
        self.precision = planned.precision
        self.specs = {param.name: param for param in planned.layout.params}
        ranks = range(mesh.world_size)
        self.full: list[np.ndarray | None] = [None for _ in ranks]
        self.parts: list[np.ndarray | None] = [None for _ in ranks]
        self.grads: list[Grads] = [{} for _ in ranks]
        self.partials: list[np.ndarray] | None = None
        self.under_way: set[str] = set()
        self.sharded_grads: list[np.ndarray | None] = [None for _ in ranks]
        self.reached: list[set[str]] = [set() for _ in ranks]
        self.shown_grads: list[np.ndarray | None] = [None for _ in ranks]
        self.shown_names: list[str] = []
        self.optimizer_state: list[dict[str, State]] = [{} for _ in ranks]
        self.steps: list[dict[str, int]] = [{} for _ in ranks]

    @property
    def authoritative(self) -> AuthoritativeStorage:
        """The authoritative storage of parameters in the stored dtype."""
        return authoritative_storage(self.layout)

    @property
    def full_is_truth(self) -> bool:
        """Whether full parameters are the shards themselves, so that they cannot become stale."""
        return shard_is_full(self.layout, cast=self.precision.is_mixed)

    # Parameters

    def gather(self, dtype: str, *, shown: bool = False) -> None:
        """Fill every rank's full buffer from the shards, in a dtype (R33).

        Args:
            shown: whether they are for the user, who edits the shard itself if nothing is sharded (R20).
        """
        self.full_layout = self.layout
        cast = dtype != self.precision.stored
        if shard_is_full(self.layout, cast=cast) or (
            shown and self.authoritative is AuthoritativeStorage.FULL and not cast
        ):
            self.full = list(self.unit.shards)
        else:
            self.full = list(self.unit.gather([shard.astype(numpy_dtype(dtype)) for shard in self.unit.shards]))
        self.parts = [None] * len(self.parts)

    def gather_parts(self, group_size: int) -> None:
        """Fill every rank's full buffer from the parts of its reshard group (R08)."""
        groups = {post_forward_group(self.unit.mesh, rank, group_size) for rank in range(self.unit.world_size)}
        parts = [part for part in self.parts if part is not None]
        self.full = list(over_groups(all_gather, parts, groups))
        self.full_layout = post_forward(self.layout, group_size)
        self.parts = [None] * len(self.parts)

    def keep_parts(self, group_size: int) -> None:
        """Keep each rank's part in its reshard group, and free the full parameters (R08)."""
        smaller = post_forward(self.layout, group_size)
        for rank in range(self.unit.world_size):
            index = post_forward_group(self.unit.mesh, rank, group_size).index(rank)
            full = self.views(rank)
            part = np.zeros(smaller.padded_shard_numel, next(iter(full.values())).dtype)
            for piece in smaller.pieces(index):
                for shard_start, param_start, numel in piece.runs():
                    values = full[piece.name].reshape(-1)[param_start : param_start + numel]
                    part[shard_start : shard_start + numel] = values
            self.parts[rank], self.full[rank] = part, None

    def free(self, ranks: Iterable[int]) -> None:
        """Free full parameters and the parts of reshard groups."""
        for rank in ranks:
            self.full[rank] = self.parts[rank] = None

    def views(self, rank: int) -> dict[str, np.ndarray]:
        """A rank's full parameters, which alias its buffer if the layout is contiguous."""
        buffer = self.full[rank]
        assert buffer is not None
        return views(self.full_layout, buffer)

    def write_full(self, rank: int, name: str, values: np.ndarray) -> None:
        """Write one parameter of a rank's full buffer, also if `views` are copies."""
        buffer = self.full[rank]
        assert buffer is not None
        _write_view(self.full_layout, buffer, name, values)

    # Gradients

    def check_grads(self, rank: int, grads: Params) -> None:
        """Raise ParamError for a gradient that does not have its parameter's shape."""
        for name, grad in grads.items():
            if name in self.specs and grad.shape != self.specs[name].shape:
                raise ParamError(
                    f"gradient of parameter {name!r}: expected shape {self.specs[name].shape}, got {grad.shape} on rank {rank}"
                )

    def add_grads(self, rank: int, grads: Params) -> None:
        """Accumulate full gradients in the dtype of unreduced gradients (R15)."""
        dtype = numpy_dtype(self.precision.accumulated(self.api))
        for spec in self.layout.params:
            grad = grads.get(spec.name)
            if grad is not None and spec.requires_grad:
                waiting = self.grads[rank].get(spec.name)
                grad = grad.astype(dtype)
                self.grads[rank][spec.name] = grad if waiting is None else waiting + grad

    def reduce(self, steps: Sequence[ReductionStep], custom_factor: float | None) -> None:
        """Apply steps of a reduction to full gradients or partial sums (R26-R29)."""
        factors = factors_of(self.unit.mesh, self.api, self.precision.reduced, custom_factor)
        if ReductionStep.CAST_TO_REDUCED in steps:
            self.under_way |= {name for grads in self.grads for name in grads}
            if missing_grad(self.api, unit_used=bool(self.under_way)) is Missing.ZEROS:
                self.under_way |= {spec.name for spec in self.layout.params if spec.requires_grad}
            buffers = self.unit.collect(self.grads)
            self.grads = [{} for _ in self.grads]
        else:
            assert self.partials is not None
            buffers, self.partials = self.partials, None
        for step in steps:
            match step:
                case ReductionStep.ADD_PARTIAL:
                    if self.partials is not None:
                        buffers = [a + b for a, b in zip(buffers, self.partials, strict=True)]
                        self.partials = None
                case ReductionStep.KEEP_PARTIAL:
                    assert self.partials is None, "an earlier partial sum would be lost"
                    self.partials = buffers
                case ReductionStep.ACCUMULATE:
                    self._accumulate(buffers)
                case _:
                    buffers = self.unit.apply(step, buffers, factors)

    def _accumulate(self, reduced: list[np.ndarray]) -> None:
        kept = numpy_dtype(self.precision.kept)
        for rank, own in enumerate(reduced if self.under_way else ()):
            before = self.sharded_grads[rank]
            total = own if before is None else before.astype(own.dtype) + own
            self.sharded_grads[rank] = total.astype(kept, copy=False)
            self.reached[rank] |= self.under_way
        self.under_way = set()

    def drop_grads(self) -> None:
        """Drop unreduced gradients and partial sums (R17)."""
        self.grads = [{} for _ in self.grads]
        self.partials = None
        self.under_way = set()

    def zero_grad(self, ranks: Iterable[int]) -> None:
        """Drop the reduced gradients of some ranks, as the `zero_grad` of an optimizer does."""
        for rank in ranks:
            self.sharded_grads[rank] = None
            self.reached[rank] = set()

    def grad_pieces(self, rank: int) -> Grads:
        """A rank's pieces of reduced gradients, as flat views by name; empty if it has none."""
        grad = self.sharded_grads[rank]
        return {} if grad is None else self.unit.pieces(grad, rank)

    def gather_grads(self) -> list[np.ndarray] | None:
        """Full reduced gradients on every rank, where a rank without any counts as zeros; None if no rank has any (R22).

        If nothing is sharded these are the gradients themselves, not copies.
        """
        if not shows_grad(grad is not None for grad in self.sharded_grads):
            return None
        zeros = np.zeros(self.layout.padded_shard_numel, numpy_dtype(self.precision.kept))
        present = [zeros.copy() if grad is None else grad for grad in self.sharded_grads]
        return present if self.authoritative is AuthoritativeStorage.FULL else self.unit.gather(present)

    def full_grads(self) -> Grads:
        """Copies of the full reduced gradients by name, without parameters that have none on any rank."""
        buffers = self.gather_grads()
        if buffers is None:
            return {}
        full = views(self.layout, buffers[0])
        return {name: full[name].copy() for name in full if any(name in reached for reached in self.reached)}

    def show_grads(self) -> None:
        """Show full gradients to the user (R22)."""
        buffers = self.gather_grads()
        self.shown_names = [name for name in self.specs if any(name in reached for reached in self.reached)]
        self.shown_grads = [None for _ in self.shown_grads] if buffers is None else list(buffers)

    def grads_shown(self, rank: int) -> Grads:
        """The gradients that `show_grads` shows on a rank."""
        buffer = self.shown_grads[rank]
        full = {} if buffer is None else views(self.layout, buffer)
        return {name: full[name] for name in self.shown_names if name in full}

    def write_shown_grad(self, rank: int, name: str, values: np.ndarray) -> None:
        """Write one of the gradients that are shown."""
        buffer = self.shown_grads[rank]
        assert buffer is not None
        _write_view(self.layout, buffer, name, values)

    def hide_grads(self, ranks: Iterable[int]) -> None:
        """Free the full gradients that were shown."""
        for rank in ranks:
            self.shown_grads[rank] = None

    # The exit of summon_full_params

    def exit(self, step: ExitStep) -> None:
        """Execute one step of the exit of `summon_full_params` (R24)."""
        ranks = range(self.unit.world_size)
        match step:
            case ExitStep.BACK_FROM_CPU:
                pass  # numpy arrays are always on the CPU
            case ExitStep.WRITEBACK:
                for rank in ranks:
                    self.unit.write(self.unit.shards[rank], self.views(rank), rank)
                    self._write_back_grads(rank)
            case ExitStep.RESHARD:
                self.free(ranks)
            case ExitStep.RESHARD_GRADS:
                self.hide_grads(ranks)
            case _:
                assert_never(step)

    def _write_back_grads(self, rank: int) -> None:
        """Write back edits of the gradients that are shown; a rank without a gradient gets none, as in torch."""
        shown, own = self.shown_grads[rank], self.sharded_grads[rank]
        if shown is not None and own is not None:
            self.unit.write(own, views(self.layout, shown), rank)

    # The optimizer

    def step(self, optimizer: Optimizer) -> None:
        """Update the elements that have a gradient, which padding never has (R05)."""
        for rank in range(self.unit.world_size):
            steps, states = self.steps[rank], self.optimizer_state[rank]
            for name in self.reached[rank]:
                steps[name] = steps.get(name, 0) + 1
            grads = self.grad_pieces(rank)
            for name, piece in self.unit.pieces(self.unit.shards[rank], rank).items():
                if name in self.reached[rank]:
                    own = grads[name].astype(piece.dtype)
                    if name not in states:
                        states[name] = optimizer.init(piece)
                    optimizer.update(piece, own, states[name], steps[name])


def _write_view(layout: Layout, buffer: np.ndarray, name: str, values: np.ndarray) -> None:
    """Write one parameter of a buffer with the layout of the gathered buffer."""
    for index in range(layout.world_size):
        for piece in layout.pieces(index):
            if piece.name == name:
                for shard_start, param_start, numel in piece.runs():
                    start = index * layout.padded_shard_numel + shard_start
                    buffer[start : start + numel] = values.reshape(-1)[param_start : param_start + numel]
