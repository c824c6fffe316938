"""One unit through its life, on all ranks at once: what each rank's memory holds, and how moves change it (R12-R25).

The state machine of `crossframe.lifecycle` says what may happen; here it happens. Every method first asks for the move, so that
what is not legal is refused before anything is changed.
"""

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from crossframe.errors import ParamError, PlanError, StateError
from crossframe.layout import Layout
from crossframe.lifecycle import Activity, Exposure, Move, Residency, UnitState
from crossframe.mesh import MeshSpec
from crossframe.plan import PlannedUnit
from crossframe.reduction import ReductionStep, reduction_steps
from crossframe.reference.bucket import Grads, LiveBucket
from crossframe.reference.unit import Params
from crossframe.unshard import ExitStep, UnshardRequest, residency_after


class LiveUnit:
    """A unit on all ranks.

    Attributes:
        states: each rank's state. They differ only while rank 0 alone is shown full parameters (R19).
        buckets: each bucket's memory.
    """

    def __init__(self, planned: PlannedUnit, mesh: MeshSpec, params: Params, fill: bool) -> None:
        self.name = planned.name
        self.reshard_after_forward = planned.reshard_after_forward
        self.keeps_full_unreduced = planned.keeps_full_unreduced
        self.mesh, self.face = mesh, planned.face
        self.states = [UnitState() for _ in range(mesh.world_size)]
        self.buckets = [LiveBucket(bucket, mesh, params, planned.face, fill) for bucket in planned.buckets]
        self._before_summon = Residency.SHARD
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
        """Back to the shards alone.

        Raises:
            StateError: while the user is shown full parameters.
        """
        if self.state.exposure is Exposure.SUMMONED:
            raise StateError(
                f"unit {self.name!r}: cannot reshard {self.state.describe()}: leave summon_full_params, which reshards"
            )
        self._conceal()
        if self.state.residency is not Residency.SHARD:
            self.move(Move.RESHARD)
            for bucket in self.buckets:
                bucket.free(self.ranks)

    def _conceal(self) -> None:
        if self.state.exposure is Exposure.FULL:
            self.move(Move.CONCEAL)

    def reshard_to_group(self) -> None:
        """Keep a smaller group's shard (R08).

        Raises:
            PlanError: the unit was planned without one.
            StateError: there are no full parameters that are fresh.
        """
        if type(self.reshard_after_forward) is not int:
            raise PlanError(
                f"unit {self.name!r}: expected the size of a smaller group to reshard to, got "
                f"reshard_after_forward={self.reshard_after_forward!r}; plan the unit with a number"
            )
        self._conceal()
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
            grads = work(rank, full) or {}
            if unknown := [name for name in grads if name not in full]:
                raise ParamError(f"unit {self.name!r}: expected gradients of {list(full)}, got one of {unknown[0]!r}")
            for bucket in self.buckets:
                bucket.check_grads(rank, grads)
                bucket.add_grads(rank, grads)
        self.move(Move.CONCEAL)
        self.move(Move.END_FORWARD if forward else Move.END_BACKWARD)

    def reset(self) -> None:
        """After an exception: the shards alone, and no gradient of the step that failed, so that the next one begins as it
        did (R17)."""
        self.move(Move.RESET)
        for bucket in self.buckets:
            bucket.free(self.ranks)
            bucket.drop_grads()
            bucket.zero_grad(self.ranks)
            bucket.hide_grads(self.ranks)

    # Gradients

    def reduction(self) -> tuple[ReductionStep, ...]:
        """The steps that this unit's gradients go through."""
        return reduction_steps(self.mesh, self.face)

    # What the user sees, and edits

    def shown(self, rank: int) -> dict[str, np.ndarray]:
        """What a rank's module shows: full parameters, or flat pieces of what the rank holds. To read; `edit` writes them."""
        if not self._shows_full(rank):
            return {k: v for b in self.buckets for k, v in b.unit.pieces(b.unit.shards[rank], rank).items()}
        return {k: v for b in self.buckets for k, v in b.views(rank).items()}

    def _shows_full(self, rank: int) -> bool:
        return self.states[rank].exposure is not Exposure.SHARDED and self.buckets[0].full[rank] is not None

    def check_edited(self) -> None:
        """Raise what `edited` would: StateError in a forward, a backward or an unsharding."""
        state = self.state
        if state.exposure is not Exposure.FULL or state.activity is not Activity.IDLE:
            state.after(Move.EDIT_SHARDS, self.name)

    def edited(self) -> None:
        """The shards were written: what was gathered from them is stale (R12), unless it is the truth itself."""
        self.check_edited()
        self._conceal()
        if not all(bucket.full_is_truth for bucket in self.buckets):
            self.move(Move.EDIT_SHARDS)

    def edit(self, rank: int, name: str, values: np.ndarray) -> None:
        """A user writes into the parameter that a rank shows. An edit of the shards makes what was gathered stale (R12).

        Raises:
            ParamError: a parameter that the rank does not show, or values of another shape (R25).
            StateError: an edit of the shards in the middle of a forward or backward.
        """
        self._check_values(
            rank, name, self.shown(rank).get(name), values, "parameter", "unshard or summon it to see all"
        )
        if self.states[rank].exposure is Exposure.SHARDED:
            self.edited()
        self._overwrite(rank, name, values)

    def _overwrite(self, rank: int, name: str, values: np.ndarray) -> None:
        for bucket in self.buckets:
            if name in bucket.specs and self._shows_full(rank):
                bucket.write_full(rank, name, values)
            elif name in bucket.specs:
                bucket.unit.pieces(bucket.unit.shards[rank], rank)[name][:] = values

    def edit_grad(self, rank: int, name: str, values: np.ndarray) -> None:
        """A user writes into a gradient that a rank is shown (R22).

        Raises:
            ParamError: a gradient that the rank is not shown, or values of another shape.
        """
        self._check_values(
            rank, name, self.grads_shown(rank).get(name), values, "gradient of parameter", "summon it with_grads=True"
        )
        for bucket in self.buckets:
            if name in bucket.specs:
                bucket.write_shown_grad(rank, name, values)

    def _check_values(
        self, rank: int, name: str, shown: np.ndarray | None, values: np.ndarray, what: str, advice: str
    ) -> None:
        if shown is None or shown.shape != values.shape:
            there = "nothing" if shown is None else f"shape {shown.shape}"
            raise ParamError(
                f"unit {self.name!r}, {what} {name!r}: rank {rank} shows {there} of it {self.states[rank].describe()}, got "
                f"values of shape {values.shape}; {advice}"
            )

    def zero_grad(self, ranks: Iterable[int] | None = None) -> None:
        """A user drops the reduced gradients of some ranks, or of all (R22)."""
        for bucket in self.buckets:
            bucket.zero_grad(self.ranks if ranks is None else ranks)

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
        self._before_summon = self.state.residency
        self._request = request
        self.reshard()
        self.move(Move.GATHER)
        for bucket in self.buckets:
            bucket.gather(bucket.precision.stored, shown=True)
            if request.with_grads:
                bucket.show_grads()
        self.move(Move.SUMMON)
        blind = [rank for rank in self.ranks if not request.visible(self.mesh.group_rank(rank))]
        if blind:
            self.move(Move.RESHARD, blind)
            for bucket in self.buckets:
                bucket.free(blind)
                bucket.hide_grads(blind)

    def grads_shown(self, rank: int) -> Grads:
        """The full gradients that a rank's user sees; what has none is missing."""
        return {name: grad for bucket in self.buckets for name, grad in bucket.grads_shown(rank).items()}

    def dismiss(self, *, failed: bool = False) -> None:
        """End `summon`: what was asked for, in its order (R24), and the memory that was there before (R21), unless the user's
        code has failed: then the shards alone."""
        if self.state.exposure is not Exposure.SUMMONED:
            raise StateError(f"unit {self.name!r}: there is no unsharding to end {self.state.describe()}")
        for step in self._request.exit_steps():
            for bucket in self.buckets:
                bucket.exit(step)
            if step is ExitStep.RESHARD:
                self.move(Move.DISMISS)
                self.move(Move.RESHARD, [rank for rank in self.ranks if self.states[rank].residency is Residency.FULL])
        before = residency_after(self._before_summon, [bucket.precision for bucket in self.buckets])
        if before is not Residency.SHARD and not failed:
            self.gather()
            if before is Residency.K_GROUP:
                self.reshard_to_group()


def keeps_original(layout: Layout) -> bool:
    """Whether the original parameters are what the user holds: always, but in a flat layout that says otherwise."""
    return getattr(layout, "keep_original", True)
