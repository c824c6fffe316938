"""One unit on all ranks at once: each rank's memory, changed by the actions of the step machine (R12-R25).

Each rank has a `UnitStep` of `crossframe.step`. A method sends it a signal and executes its actions for all ranks, so a signal
that is not legal raises before anything is changed.
"""

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from crossframe.errors import ParamError, PlanError
from crossframe.layout import Layout
from crossframe.lifecycle import Exposure, UnitState
from crossframe.mesh import MeshSpec
from crossframe.plan import PlannedUnit
from crossframe.reduction import ReductionStep, reduction_steps
from crossframe.reference.bucket import Grads, LiveBucket
from crossframe.reference.unit import Params
from crossframe.step import Action, StepSettings, UnitStep
from crossframe.step.unit import Actions
from crossframe.unshard import UnshardRequest


class LiveUnit:
    """A unit on all ranks.

    Attributes:
        steps: each rank's state machine. Their states differ only while rank 0 alone is shown full parameters (R19).
        buckets: each bucket's memory.
    """

    def __init__(self, planned: PlannedUnit, mesh: MeshSpec, params: Params, fill: bool) -> None:
        self.name = planned.name
        self.reshard_after_forward = planned.reshard_after_forward
        self.keeps_full_unreduced = planned.keeps_full_unreduced
        self.mesh, self.api = mesh, planned.api
        settings = StepSettings(
            reshard_after_forward=planned.reshard_after_forward, keep_without_reduction=planned.keeps_full_unreduced
        )
        mixed = any(bucket.precision.is_mixed for bucket in planned.buckets)
        self.steps = [UnitStep(planned.name, settings, mixed=mixed) for _ in self.ranks]
        self.buckets = [LiveBucket(bucket, mesh, params, planned.api, fill) for bucket in planned.buckets]
        self._request = UnshardRequest()

    @property
    def states(self) -> list[UnitState]:
        """Each rank's state."""
        return [step.state for step in self.steps]

    @property
    def state(self) -> UnitState:
        """The state of rank 0, which sees all that any rank sees."""
        return self.steps[0].state

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.mesh.world_size)

    def _signal(self, signal: Callable[[UnitStep], Actions]) -> None:
        """Send every rank's machine a signal, and execute the actions, which are the same on all ranks."""
        actions = [signal(step) for step in self.steps]
        assert len(set(actions)) == 1
        for action in actions[0]:
            self._execute(action)

    def _execute(self, action: Action) -> None:
        for bucket in self.buckets:
            match action:
                case Action.GATHER:
                    bucket.gather(bucket.precision.gathered)
                case Action.GATHER_FROM_GROUP:
                    bucket.gather_parts(int(self.reshard_after_forward))
                case Action.RESHARD_TO_GROUP:
                    bucket.keep_parts(int(self.reshard_after_forward))
                case Action.FREE | Action.FREE_GROUP_SHARD:
                    bucket.free(self.ranks)
                case Action.SUMMON:
                    self._show(bucket)
                case Action.DISMISS:
                    for step in self._request.exit_steps():
                        bucket.exit(step)
                case _:
                    pass  # arrays are readable at once, and there are no modules

    # Parameters in use

    def gather(self) -> None:
        """Gather full parameters in the dtype of compute, unless they are in memory and not stale."""
        self._signal(UnitStep.gather)

    def unshard(self) -> None:
        """Gather full parameters and expose them (FSDP2's `unshard`). Edits of them are lost when they are freed."""
        self._signal(UnitStep.unshard)
        self._signal(UnitStep.expose)

    def reshard(self) -> None:
        """Free the full parameters.

        Raises:
            StateError: the unit is summoned.
        """
        self._signal(UnitStep.reshard)

    def reshard_to_group(self) -> None:
        """Free the full parameters except each rank's part in its reshard group (R08).

        Raises:
            PlanError: the unit was planned without reshard groups.
            StateError: there are no full parameters, or they are stale.
        """
        if type(self.reshard_after_forward) is not int:
            raise PlanError(
                f"unit {self.name!r}: expected the size of a reshard group, got "
                f"reshard_after_forward={self.reshard_after_forward!r}; plan the unit with a number"
            )
        self._signal(UnitStep.reshard_to_group)

    def after_forward(self) -> None:
        """Keep or free the full parameters after a forward, according to the unit's settings (R13, R14)."""
        self._signal(UnitStep.after_forward)

    def compute(self, phase: str, work: Callable[[int, Mapping[str, np.ndarray]], Params | None]) -> None:
        """Run `work(rank, full parameters)` on every rank; in backward it returns the gradients of the rank."""
        forward = phase == "forward"
        if forward:
            self._signal(UnitStep.begin_forward)
            self._signal(UnitStep.enter_forward)
        else:
            self._signal(UnitStep.begin_backward)
        for rank in self.ranks:
            full = {name: value for bucket in self.buckets for name, value in bucket.views(rank).items()}
            grads = work(rank, full) or {}
            if unknown := [name for name in grads if name not in full]:
                raise ParamError(f"unit {self.name!r}: expected gradients of {list(full)}, got one of {unknown[0]!r}")
            for bucket in self.buckets:
                bucket.check_grads(rank, grads)
                bucket.add_grads(rank, grads)
        self._signal(UnitStep.conceal)
        self._signal(UnitStep.end_forward if forward else UnitStep.leave_backward)

    def reset(self) -> None:
        """After an exception, free the full parameters and drop the gradients of the failed step (R17)."""
        for step in self.steps:
            step.reset()
        for bucket in self.buckets:
            bucket.free(self.ranks)
            bucket.drop_grads()
            bucket.zero_grad(self.ranks)
            bucket.hide_grads(self.ranks)

    # Gradients

    def reduction(self) -> tuple[ReductionStep, ...]:
        """The steps of the reduction of this unit's gradients."""
        return reduction_steps(self.mesh, self.api)

    # Parameters and gradients that the user sees and edits

    def shown(self, rank: int) -> dict[str, np.ndarray]:
        """The parameters that a rank exposes, read-only: full ones, or flat pieces of its shard. Use `edit` to write them."""
        if not self._shows_full(rank):
            return {k: v for b in self.buckets for k, v in b.unit.pieces(b.unit.shards[rank], rank).items()}
        return {k: v for b in self.buckets for k, v in b.views(rank).items()}

    def _shows_full(self, rank: int) -> bool:
        return self.states[rank].exposure is not Exposure.SHARDED and self.buckets[0].full[rank] is not None

    def check_edited(self) -> None:
        """Raise StateError in a forward, in a backward or if the unit is summoned, as `edited` does."""
        self.steps[0].check_edit()

    def edited(self) -> None:
        """Signal that the shards were written: gathered copies are stale (R12), unless they are the shards themselves."""
        self.check_edited()
        in_place = all(bucket.full_is_truth for bucket in self.buckets)
        self._signal(UnitStep.conceal if in_place else UnitStep.edit)

    def edit(self, rank: int, name: str, values: np.ndarray) -> None:
        """Write a parameter that a rank exposes, as a user. An edit of the shards makes gathered copies stale (R12).

        Raises:
            ParamError: the rank does not expose the parameter, or the values have another shape (R25).
            StateError: the shards are edited during a forward or backward.
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
        """Write a gradient that is shown on a rank, as a user (R22).

        Raises:
            ParamError: the gradient is not shown on the rank, or the values have another shape.
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
        """Drop the reduced gradients of some ranks, or of all, as a user (R22)."""
        for bucket in self.buckets:
            bucket.zero_grad(self.ranks if ranks is None else ranks)

    def check_summon(self, request: UnshardRequest) -> None:
        """Raise the errors of `summon`."""
        for bucket in self.buckets:
            request.check(keeps_original=keeps_original(bucket.layout), authoritative=bucket.authoritative)
        for step in self.steps:
            step.check_summon()

    def summon(self, request: UnshardRequest) -> None:
        """Show the user full parameters in full precision (R18, R19).

        Raises:
            StateError: the unit is in its forward or backward, or is summoned already. Nothing has changed then.
            UnsupportedError: an unsupported combination of options (R23).
        """
        self.check_summon(request)
        self._request = request
        for rank, step in enumerate(self.steps):
            actions = step.summon(visible=self._sees(rank))
        for action in actions:
            self._execute(action)

    def _sees(self, rank: int) -> bool:
        return self._request.visible(self.mesh.group_rank(rank))

    def _show(self, bucket: LiveBucket) -> None:
        bucket.gather(bucket.precision.stored, shown=True)
        if self._request.with_grads:
            bucket.show_grads()
        blind = [rank for rank in self.ranks if not self._sees(rank)]
        bucket.free(blind)
        bucket.hide_grads(blind)

    def grads_shown(self, rank: int) -> Grads:
        """The full gradients that are shown on a rank, without parameters that have none."""
        return {name: grad for bucket in self.buckets for name, grad in bucket.grads_shown(rank).items()}

    def dismiss(self, *, failed: bool = False) -> None:
        """End `summon`: execute the steps of the exit in order (R24), then return to the memory before it (R21).

        Args:
            failed: whether the user's code raised; then memory returns to the shards.
        """
        self._signal(UnitStep.dismiss)
        if not failed:
            self._signal(UnitStep.return_memory)


def keeps_original(layout: Layout) -> bool:
    """Whether the user has the original parameters: always, except in a flat layout with `keep_original=False`."""
    return getattr(layout, "keep_original", True)
