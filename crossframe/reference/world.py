"""A sharded model on all ranks, which executes a plan event by event."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from crossframe.dtypes import numpy_dtype
from crossframe.errors import PlanError, UnitError
from crossframe.grad_norm import norm_dtype
from crossframe.lifecycle import Activity, Exposure, Move
from crossframe.mesh import MeshSpec
from crossframe.plan import PlannedUnit, api_of
from crossframe.reduction import ReductionStep
from crossframe.reference.grad_norm import clip_coefficient, combine, partial
from crossframe.reference.live_unit import LiveUnit
from crossframe.reference.net import Batch, Net
from crossframe.reference.optim import SGD, Optimizer
from crossframe.trace import (
    ALL_GATHER,
    ALL_REDUCE,
    CAST,
    COMPUTE,
    FREE,
    REDUCE_SCATTER,
    RESHARD_TO_GROUP,
    STEP,
    Event,
)
from crossframe.unshard import UnshardRequest


class World:
    """A sharded model, its gradients and its optimizer.

    Attributes:
        units: units by name.
        mesh: the ranks.
        api: the API whose behavior applies.
    """

    def __init__(
        self,
        units: Sequence[PlannedUnit],
        mesh: MeshSpec,
        params: Mapping[str, np.ndarray],
        *,
        optimizer: Optimizer | None = None,
        divide_factor: float | None = None,
        fill: bool = True,
    ) -> None:
        """Shard a model.

        Args:
            units: from `plan_units`.
            params: every parameter by name, in full.
            optimizer: the optimizer; None: SGD with its defaults.
            divide_factor: divide gradients by this factor instead of the number of ranks (R27).
            fill: store torch's values in the padding (R05); False stores zeros.
        """
        self.mesh, self.api = mesh, api_of(units)
        self.units = {unit.name: LiveUnit(unit, mesh, params, fill) for unit in units}
        self._optimizer = optimizer or SGD()
        self._divide_factor = divide_factor

    # A step

    def run(self, plan: Sequence[Event], net: Net, batches: Sequence[Sequence[Batch]]) -> np.ndarray:
        """Execute a plan for all ranks.

        Any exception brings all units back to their shards and drops the gradients of the failed step (R17).

        Args:
            plan: from `step_plan`, of any rank, since all ranks do the same in their own groups.
            batches: the batch of each rank, by microbatch.

        Returns:
            Losses of shape (microbatches, ranks).

        Raises:
            PlanError: the numbers of batches are not those of the plan's microbatches and the mesh's ranks.
            StateError: a unit is summoned, in which case nothing has changed; or an event is not legal in its place.
        """
        if unknown := [event.unit for event in plan if event.kind != STEP and event.unit not in self.units]:
            raise PlanError(f"the plan has a unit {unknown[0]!r}: expected those of the world, {list(self.units)}")
        if not plan:
            raise PlanError("expected a plan of at least one event, got none")
        self._check_groups(plan)
        for unit in self.units.values():
            unit.state.after(Move.BEGIN_FORWARD, unit.name)
        microbatches = 1 + max(event.microbatch for event in plan)
        if len(batches) != microbatches or any(len(of_ranks) != self.mesh.world_size for of_ranks in batches):
            raise PlanError(
                f"expected batches of {microbatches} microbatches for {self.mesh.world_size} ranks, got those of "
                f"{len(batches)} for {[len(of_ranks) for of_ranks in batches]}"
            )
        losses = np.zeros((microbatches, self.mesh.world_size))
        try:
            for event in plan:
                self._begin_phase(event, net, batches, losses)
                self.execute(event, net)
        except BaseException:
            self.reset()
            raise
        finally:
            self._at = None
        return losses

    def _check_groups(self, plan: Sequence[Event]) -> None:
        """Raise PlanError for a plan that was made for another mesh."""
        shards, replicas = {self.mesh.shard}, {self.mesh.replicate}
        smaller = {size for u in self.units.values() if type(size := u.reshard_after_forward) is int}
        sizes = {ALL_GATHER: shards | smaller, REDUCE_SCATTER: shards, ALL_REDUCE: replicas}
        for event in plan:
            if (
                len(event.group) not in sizes.get(event.kind, {len(event.group)})
                or max(event.group) >= self.mesh.world_size
            ):
                raise PlanError(
                    f"the plan was made for another mesh: expected {self.mesh}, got a {event.kind} over ranks {event.group}; "
                    "plan the step for this world's mesh"
                )

    _at: tuple[int, str] | None = None

    def _begin_phase(self, event: Event, net: Net, batches: Sequence[Sequence[Batch]], losses: np.ndarray) -> None:
        """Begin a microbatch before its forward, and read its losses before its backward."""
        at = (event.microbatch, event.phase)
        if at != self._at:
            self._at = at
            for rank in range(self.mesh.world_size):
                if event.phase == "forward":
                    net.start(rank, batches[event.microbatch][rank])
                elif event.phase == "backward":
                    losses[event.microbatch, rank] = net.loss(rank)

    def execute(self, event: Event, net: Net) -> None:
        """Execute one event. Events of several buckets of a unit act on the unit once, with the first bucket."""
        if event.kind == STEP:
            self.step()
            return
        unit = self.units[event.unit]
        if event.kind in (REDUCE_SCATTER, ALL_REDUCE):
            self._reduce(unit, event)
        elif event.bucket == 0:
            if event.kind in (ALL_GATHER, CAST):
                unit.gather()
            elif event.kind == FREE:
                unit.reshard()
            elif event.kind == RESHARD_TO_GROUP:
                unit.reshard_to_group()
            elif event.kind == COMPUTE:
                self._compute(unit, event.phase, net)

    def _compute(self, unit: LiveUnit, phase: str, net: Net) -> None:
        if phase == "forward":
            unit.compute(phase, lambda rank, params: net.forward(unit.name, rank, params))
        else:
            unit.compute(phase, lambda rank, params: net.backward(unit.name, rank, params))

    def _reduce(self, unit: LiveUnit, event: Event) -> None:
        """Execute the part of a reduction that belongs to an event. The all-reduce continues with the partial sum."""
        bucket = unit.buckets[event.bucket]
        steps = unit.reduction()
        if ReductionStep.ALL_REDUCE in steps and ReductionStep.REDUCE_SCATTER in steps:
            at = steps.index(ReductionStep.ALL_REDUCE)
            steps = (*steps[:at], ReductionStep.KEEP_PARTIAL) if event.kind == REDUCE_SCATTER else steps[at:]
        bucket.reduce(steps, self._divide_factor)

    def reduce(self, name: str) -> None:
        """Reduce the gradients of a unit now; StateError in a forward, in a backward or if it is summoned."""
        unit = self.units[name]
        unit.check_edited()
        for bucket in unit.buckets:
            if any(bucket.grads):  # on any rank
                bucket.reduce(unit.reduction(), self._divide_factor)

    def step(self) -> None:
        """Run the optimizer's step and its `zero_grad`. On a single rank, its own gradients are the mean (R26)."""
        for unit in self.units.values():
            unit.check_edited()
        for name, unit in self.units.items():
            if self.mesh.world_size == 1:
                self.reduce(name)
            unit.edited()
            for bucket in unit.buckets:
                bucket.step(self._optimizer)
            unit.zero_grad()

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scale all reduced gradients so that their norm, which counts each element once, is at most `max_norm` (R30).

        Returns:
            The norm before scaling.
        """
        buckets = [bucket for unit in self.units.values() for bucket in unit.buckets]
        dtype = norm_dtype(bucket.precision.kept for bucket in buckets)
        partials = [partial(self._own_grads(rank), norm_type, dtype) for rank in range(self.mesh.world_size)]
        norms = []
        for rank in range(self.mesh.world_size):
            of_group = (partials[other] for other in self.mesh.shard_group(rank))
            norms.append(combine(of_group, norm_type, dtype))
            for grad in self._own_grads(rank):
                grad[:] = (grad.astype(numpy_dtype(dtype)) * clip_coefficient(norms[rank], max_norm)).astype(grad.dtype)
        return float(norms[0])

    def _own_grads(self, rank: int) -> list[np.ndarray]:
        """Views of a rank's pieces of reduced gradients, without padding."""
        return [
            piece
            for unit in self.units.values()
            for bucket in unit.buckets
            for piece in bucket.grad_pieces(rank).values()
        ]

    def reset(self) -> None:
        """Bring every unit back to its shards (R17)."""
        for unit in self.units.values():
            unit.reset()

    # Full values

    def full_params(self) -> dict[str, np.ndarray]:
        """Copies of all full parameters by name. The memory of the units does not change."""
        return {
            name: value
            for unit in self.units.values()
            for bucket in unit.buckets
            for name, value in bucket.unit.unshard()[0].items()
        }

    def full_grads(self) -> dict[str, np.ndarray]:
        """Copies of all full reduced gradients by name, without parameters that have none."""
        return {
            name: grad
            for unit in self.units.values()
            for bucket in unit.buckets
            for name, grad in bucket.full_grads().items()
        }

    # Full parameters for the user

    @contextmanager
    def summon_full_params(
        self, request: UnshardRequest | None = None, names: Sequence[str] | None = None
    ) -> Iterator[None]:
        """A context in which units show full parameters (R18-R24).

        Args:
            request: the options; None: the defaults.
            names: names of the units; None: all units (`recurse=True`).

        Raises:
            UnitError: a name is not that of a unit, or occurs twice.
            StateError: a unit is in its forward or backward, or is summoned. Nothing has changed then.
            UnsupportedError: an unsupported combination of options (R23).
        """
        chosen = self._chosen(names)
        request = request or UnshardRequest()
        self._check_idle()
        for unit in chosen:
            unit.check_summon(request)
        for unit in chosen:
            unit.summon(request)
        failed = True
        try:
            yield
            failed = False
        finally:
            for unit in reversed(chosen):
                if unit.state.exposure is Exposure.SUMMONED:  # a reset inside has ended it already
                    unit.dismiss(failed=failed)

    def _chosen(self, names: Sequence[str] | None) -> list[LiveUnit]:
        asked = list(self.units) if names is None else list(names)
        if isinstance(names, str) or len(set(asked)) != len(asked) or not set(asked) <= set(self.units):
            raise UnitError(f"expected names of units out of {list(self.units)}, each once, got {names!r}")
        return [self.units[name] for name in asked]

    def _check_idle(self) -> None:
        """Raise StateError if any unit is in its forward or backward (R18)."""
        for unit in self.units.values():
            if unit.state.activity is not Activity.IDLE:
                unit.check_summon(UnshardRequest())

    @property
    def summoned(self) -> bool:
        """Whether any unit is summoned."""
        return any(unit.state.exposure is Exposure.SUMMONED for unit in self.units.values())
