"""One unit through its life, on all ranks at once: what each rank's memory holds, and how moves change it (R12-R25).

The state machine of `crossframe.lifecycle` says what may happen; here it happens. Every method first asks for the move, so that
what is not legal is refused before anything is changed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from crossframe.dtypes import numpy_dtype
from crossframe.errors import ParamError, StateError
from crossframe.faces import Face
from crossframe.layout import Layout, post_forward, post_forward_group, views
from crossframe.lifecycle import Activity, Exposure, Move, Residency, UnitState
from crossframe.mesh import MeshSpec
from crossframe.plan import PlannedBucket, PlannedUnit
from crossframe.reduction import Missing, ReductionStep, factors_of, missing_grad, reduction_steps
from crossframe.reference.collectives import all_gather, over_groups
from crossframe.reference.optim import Optimizer, State
from crossframe.reference.unit import Params, ReferenceUnit
from crossframe.unshard import Truth, UnshardRequest, residency_after, shows_grad

Grads = dict[str, np.ndarray]


class LiveBucket:
    """The memory of one bucket. Lists have one entry a rank.

    Attributes:
        unit: the shards, which are the truth.
        full: gathered buffers of shape (full_layout.gathered_numel,), or None; in the dtype that was gathered.
        full_layout: how these are laid out: as the shards are, or as a smaller group's shards are (R08).
        parts: shards of a smaller group, or None.
        grads: full gradients that were not reduced yet, by name.
        partials: sums over the shard group that wait for that over replicas (R28), or None.
        sharded_grads: reduced gradients of shape (padded_shard_numel,), or None.
        reached: parameters that have a reduced gradient.
    """

    def __init__(self, planned: PlannedBucket, mesh: MeshSpec, params: Params, face: Face, fill: bool) -> None:
        self.unit = ReferenceUnit(planned.layout, params, fill=fill, mesh=mesh, precision=planned.precision)
        self.face = face
        self.layout: Layout = planned.layout
        self.full_layout: Layout = planned.layout
        self.precision = planned.precision
        ranks = range(mesh.world_size)
        self.full: list[np.ndarray | None] = [None for _ in ranks]
        self.parts: list[np.ndarray | None] = [None for _ in ranks]
        self.grads: list[Grads] = [{} for _ in ranks]
        self.partials: list[np.ndarray] | None = None
        self.sharded_grads: list[np.ndarray] | None = None
        self.reached: set[str] = set()
        self.shown_grads: list[Grads | None] = [None for _ in ranks]
        self.optimizer_state: list[dict[str, State]] = [{} for _ in ranks]
        self.steps = dict.fromkeys((param.name for param in planned.layout.params), 0)

    @property
    def truth(self) -> Truth:
        """Where nothing is sharded, full parameters in the stored dtype are the truth itself, and no copy of it."""
        return Truth.FULL_STORAGE if self.layout.world_size == 1 else Truth.SHARDS

    @property
    def full_is_truth(self) -> bool:
        """Whether what is gathered is no copy, so that it cannot go stale."""
        return self.truth is Truth.FULL_STORAGE and not self.precision.is_mixed

    # Parameters

    def gather(self, dtype: str) -> None:
        """Fill every rank's full buffer from the shards, in a dtype (R33)."""
        self.full_layout = self.layout
        if self.truth is Truth.FULL_STORAGE and dtype == self.precision.stored:
            self.full = list(self.unit.shards)
        else:
            self.full = list(self.unit.gather([shard.astype(numpy_dtype(dtype)) for shard in self.unit.shards]))
        self.parts = [None] * len(self.parts)

    def gather_parts(self, group_size: int) -> None:
        """Fill every rank's full buffer from the shards of its smaller group (R08)."""
        groups = {post_forward_group(self.unit.mesh, rank, group_size) for rank in range(self.unit.world_size)}
        parts = [part for part in self.parts if part is not None]
        self.full = list(over_groups(all_gather, parts, groups))
        self.full_layout = post_forward(self.layout, group_size)
        self.parts = [None] * len(self.parts)

    def keep_parts(self, group_size: int) -> None:
        """Keep a smaller group's shard of the full parameters, and free the rest (R08)."""
        smaller = post_forward(self.layout, group_size)
        for rank in range(self.unit.world_size):
            index = post_forward_group(self.unit.mesh, rank, group_size).index(rank)
            full = self.views(rank)
            part = np.zeros(smaller.padded_shard_numel, next(iter(full.values())).dtype)
            for piece in smaller.pieces(index):
                for shard_start, param_start, numel in piece.runs():
                    part[shard_start : shard_start + numel] = full[piece.name].reshape(-1)[
                        param_start : param_start + numel
                    ]
            self.parts[rank], self.full[rank] = part, None

    def free(self, ranks: Iterable[int]) -> None:
        """Free what was gathered."""
        for rank in ranks:
            self.full[rank] = self.parts[rank] = None

    def views(self, rank: int) -> dict[str, np.ndarray]:
        """A rank's full parameters, which alias its buffer where the layout is contiguous."""
        buffer = self.full[rank]
        assert buffer is not None
        return views(self.full_layout, buffer)

    # Gradients

    def add_grads(self, rank: int, grads: Params) -> None:
        """Accumulate full gradients, in the dtype in which they wait (R15)."""
        dtype = numpy_dtype(self.precision.accumulated(self.face))
        for spec in self.layout.params:
            grad = grads.get(spec.name)
            if grad is not None and spec.requires_grad:
                waiting = self.grads[rank].get(spec.name)
                grad = grad.astype(dtype)
                self.grads[rank][spec.name] = grad if waiting is None else waiting + grad

    def reduce(self, steps: Sequence[ReductionStep], custom_factor: float | None) -> None:
        """Take full gradients, or partial sums of them, through steps of a reduction (R26-R29)."""
        factors = factors_of(self.unit.mesh, self.face, self.precision.reduced, custom_factor)
        if ReductionStep.CAST_TO_REDUCED in steps:
            self.reached |= {name for grads in self.grads for name in grads}
            if missing_grad(self.face, unit_used=bool(self.reached)) is Missing.ZEROS:
                self.reached |= {spec.name for spec in self.layout.params if spec.requires_grad}
            buffers = self.unit.collect(self.grads)
            self.grads = [{} for _ in self.grads]
        else:
            assert self.partials is not None
            buffers, self.partials = self.partials, None
        for step in steps:
            buffers = self.unit.apply(step, buffers, factors)
            if step is ReductionStep.ADD_PARTIAL and self.partials is not None:
                buffers = [a + b for a, b in zip(buffers, self.partials, strict=True)]
                self.partials = None
            elif step is ReductionStep.KEEP_PARTIAL:
                self.partials = buffers
            elif step is ReductionStep.ACCUMULATE:
                before = self.sharded_grads
                after = buffers if before is None else [a + b for a, b in zip(before, buffers, strict=True)]
                self.sharded_grads = after if self.reached else None

    def drop_grads(self) -> None:
        """Forget gradients that are on their way (R17)."""
        self.grads = [{} for _ in self.grads]
        self.partials = None

    def zero_grad(self) -> None:
        """Forget the reduced gradients, as an optimizer's `zero_grad` does."""
        self.sharded_grads = None
        self.reached = set()

    def step(self, optimizer: Optimizer) -> None:
        """Let the optimizer change the elements that have a gradient; padding has none (R05)."""
        if self.sharded_grads is None:
            return
        for name in self.reached:
            self.steps[name] += 1
        for rank, grad in enumerate(self.sharded_grads):
            for name, piece in self.unit.pieces(self.unit.shards[rank], rank).items():
                if name in self.reached:
                    own = self.unit.pieces(grad, rank)[name].astype(piece.dtype)
                    state = self.optimizer_state[rank].setdefault(name, optimizer.init(piece))
                    optimizer.update(piece, own, state, self.steps[name])


class LiveUnit:
    """A unit on all ranks.

    Attributes:
        states: each rank's state. They differ only while rank 0 alone is shown full parameters (R19).
        buckets: each bucket's memory.
    """

    def __init__(self, planned: PlannedUnit, mesh: MeshSpec, params: Params, face: Face, fill: bool) -> None:
        self.name = planned.name
        self.reshard_after_forward = planned.reshard_after_forward
        self.keeps_full_unreduced = planned.keeps_full_unreduced
        self.mesh, self.face = mesh, face
        self.states = [UnitState() for _ in range(mesh.world_size)]
        self.buckets = [LiveBucket(bucket, mesh, params, face, fill) for bucket in planned.buckets]
        self._before_summon: list[Residency] = []
        self._request = UnshardRequest()

    @property
    def state(self) -> UnitState:
        """The state of rank 0, which sees all that any rank sees."""
        return self.states[0]

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.mesh.world_size)

    def move(self, move: Move, ranks: Iterable[int] | None = None) -> None:
        """Take a step of the lifecycle on some ranks, or on all; StateError, and no rank moves, where one may not."""
        chosen = list(self.ranks if ranks is None else ranks)
        following = [self.states[rank].after(move, self.name) for rank in chosen]
        for rank, state in zip(chosen, following, strict=True):
            self.states[rank] = state

    # Parameters in use

    def gather(self) -> None:
        """Have full parameters in memory, in the dtype of compute; nothing to do if they are there and fresh."""
        state = self.state
        if state.residency is Residency.FULL and not state.freshness:
            return
        self.move(Move.GATHER)
        for bucket in self.buckets:
            if state.residency is Residency.K_GROUP and not state.freshness:
                bucket.gather_parts(int(self.reshard_after_forward))
            else:
                bucket.gather(bucket.precision.gathered)

    def unshard(self) -> None:
        """Full parameters, shown on the module (FSDP2's `unshard`). Edits of them are lost when they are freed."""
        self.gather()
        if self.state.exposure is not Exposure.FULL:
            self.move(Move.EXPOSE)

    def reshard(self) -> None:
        """Back to the shards alone."""
        if self.state.exposure is Exposure.FULL:
            self.move(Move.CONCEAL)
        if self.state.residency is not Residency.SHARD:
            self.move(Move.RESHARD)
            for bucket in self.buckets:
                bucket.free(self.ranks)

    def reshard_to_group(self) -> None:
        """Keep a smaller group's shard (R08)."""
        if self.state.exposure is Exposure.FULL:
            self.move(Move.CONCEAL)
        self.move(Move.RESHARD_TO_GROUP)
        for bucket in self.buckets:
            bucket.keep_parts(int(self.reshard_after_forward))

    def after_forward(self) -> None:
        """What the unit's choice says becomes of its full parameters behind a forward (R13, R14)."""
        if type(self.reshard_after_forward) is int:
            self.reshard_to_group()
        elif self.reshard_after_forward:
            self.reshard()

    def compute(self, phase: str, work: Callable[[int, Mapping[str, np.ndarray]], Params | None]) -> None:
        """Run `work(rank, full parameters)` on every rank; in backward it returns the rank's gradients."""
        forward = phase == "forward"
        self.move(Move.BEGIN_FORWARD if forward else Move.BEGIN_BACKWARD)
        self.unshard()
        for rank in self.ranks:
            full = {name: value for bucket in self.buckets for name, value in bucket.views(rank).items()}
            grads = work(rank, full)
            for bucket in self.buckets if grads is not None else ():
                bucket.add_grads(rank, grads or {})
        self.move(Move.CONCEAL)
        self.move(Move.END_FORWARD if forward else Move.END_BACKWARD)

    def reset(self) -> None:
        """After an exception: the shards alone, and no gradient half done (R17)."""
        self.move(Move.RESET)
        for bucket in self.buckets:
            bucket.free(self.ranks)
            bucket.drop_grads()
            bucket.shown_grads = [None] * len(bucket.shown_grads)

    # Gradients

    def reduction(self, *, all_reduce: bool = True) -> tuple[ReductionStep, ...]:
        """The steps that this unit's gradients go through."""
        return reduction_steps(self.mesh, self.face, all_reduce=all_reduce)

    # What the user sees, and edits

    def shown(self, rank: int) -> dict[str, np.ndarray]:
        """What a rank's module shows: full parameters, or flat pieces of what the rank holds. Arrays to read and to write."""
        if self.states[rank].exposure is Exposure.SHARDED or self.buckets[0].full[rank] is None:
            return {k: v for b in self.buckets for k, v in b.unit.pieces(b.unit.shards[rank], rank).items()}
        return {k: v for b in self.buckets for k, v in b.views(rank).items()}

    def edited(self) -> None:
        """The shards were written: what was gathered from them is stale (R12), unless it is the truth itself."""
        if self.state.exposure is Exposure.FULL:
            self.move(Move.CONCEAL)
        if not all(bucket.full_is_truth for bucket in self.buckets):
            self.move(Move.EDIT_SHARDS)

    def edit(self, rank: int, name: str, values: np.ndarray) -> None:
        """A user writes into the parameter that a rank shows. An edit of the shards makes what was gathered stale (R12).

        Raises:
            ParamError: a parameter that the rank does not show, or values of another shape (R25).
            StateError: an edit of the shards in the middle of a forward or backward.
        """
        target = self.shown(rank).get(name)
        if target is None:
            raise ParamError(f"parameter {name!r}: rank {rank} shows none of it; unit {self.name!r} shows others")
        if target.shape != values.shape:
            raise ParamError(
                f"parameter {name!r}: rank {rank} shows shape {target.shape}, got values of {values.shape}"
            )
        if self.states[rank].exposure is Exposure.SHARDED:
            self.edited()
        self._overwrite(rank, name, values)

    def _overwrite(self, rank: int, name: str, values: np.ndarray) -> None:
        for bucket in self.buckets:
            if name not in bucket.steps:
                continue
            if self.states[rank].exposure is Exposure.SHARDED or bucket.full[rank] is None:
                bucket.unit.pieces(bucket.unit.shards[rank], rank)[name][:] = values
            else:
                _write_view(bucket, rank, name, values)

    def check_summon(self, request: UnshardRequest) -> None:
        """Raise what `summon` would."""
        for bucket in self.buckets:
            request.check(keeps_original=keeps_original(bucket.layout), truth=bucket.truth)
        for state in self.states:
            if state.activity is not Activity.IDLE or state.exposure is Exposure.SUMMONED:
                state.after(Move.SUMMON, self.name)

    def summon(self, request: UnshardRequest) -> None:
        """Show the user full parameters in full precision (R18, R19).

        Raises:
            StateError: in a forward or backward, or summoned already. Nothing is changed then.
            UnsupportedError: what no rank could do (R23).
        """
        self.check_summon(request)
        self._before_summon = [state.residency for state in self.states]
        self._request = request
        self.reshard()
        self.move(Move.GATHER)
        for bucket in self.buckets:
            bucket.gather(bucket.precision.stored)
            if request.with_grads:
                self._show_grads(bucket)
        self.move(Move.SUMMON)
        blind = [rank for rank in self.ranks if not request.visible(rank)]
        if blind:
            self.move(Move.RESHARD, blind)
            for bucket in self.buckets:
                bucket.free(blind)

    def _show_grads(self, bucket: LiveBucket) -> None:
        """Full gradients of what was reduced; where no rank has any, none (R22)."""
        if not shows_grad(spec.name in bucket.reached for spec in bucket.layout.params):
            return
        assert bucket.sharded_grads is not None
        for rank, buffer in enumerate(bucket.unit.gather(bucket.sharded_grads)):
            full = views(bucket.layout, buffer)
            bucket.shown_grads[rank] = {name: full[name] for name in bucket.reached}

    def grads_shown(self, rank: int) -> Grads:
        """The full gradients that a rank's user sees; what has none is missing."""
        return {name: grad for bucket in self.buckets for name, grad in (bucket.shown_grads[rank] or {}).items()}

    def dismiss(self, *, failed: bool = False) -> None:
        """End `summon`, in the order of `crossframe.unshard.ExitStep`: persist the edits if asked (R20), free, and return to
        the memory that was there before (R21), unless the user's code has failed."""
        if self.state.exposure is not Exposure.SUMMONED:
            raise StateError(f"unit {self.name!r}: there is no unsharding to end {self.state.describe()}")
        for bucket in self.buckets:
            for rank in self.ranks if self._request.writeback else ():
                bucket.unit.write(bucket.unit.shards[rank], bucket.views(rank), rank)
                grads = bucket.shown_grads[rank]
                if grads is not None and bucket.sharded_grads is not None:
                    zeros = {spec.name: np.zeros(spec.shape) for spec in bucket.layout.params}
                    bucket.unit.write(bucket.sharded_grads[rank], zeros | grads, rank)
            bucket.shown_grads = [None] * len(bucket.shown_grads)
            bucket.free(self.ranks)
        self.move(Move.DISMISS)
        self.move(Move.RESHARD, [rank for rank in self.ranks if self.states[rank].residency is not Residency.SHARD])
        before = residency_after(self._before_summon[0], self.buckets[0].precision)
        if before is not Residency.SHARD and not failed:
            self.gather()
            if before is Residency.K_GROUP:
                self.reshard_to_group()


def keeps_original(layout: Layout) -> bool:
    """Whether the original parameters are what the user holds: always, but in a flat layout that says otherwise."""
    return getattr(layout, "keep_original", True)


def _write_view(bucket: LiveBucket, rank: int, name: str, values: np.ndarray) -> None:
    """Write one parameter of a full buffer, also where a view of it is a copy."""
    layout, buffer = bucket.full_layout, bucket.full[rank]
    assert buffer is not None
    for index in range(layout.world_size):
        shard = buffer[index * layout.padded_shard_numel : (index + 1) * layout.padded_shard_numel]
        for piece in layout.pieces(index):
            if piece.name == name:
                for shard_start, param_start, numel in piece.runs():
                    shard[shard_start : shard_start + numel] = values.reshape(-1)[param_start : param_start + numel]
