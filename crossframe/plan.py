"""Lists the events of a training step by running the step machine (`crossframe.step`), which holds the rules.
A step is one or more microbatches, each with a forward and a backward, followed by the optimizer step; in a pipeline, a schedule
orders the forwards and backwards of a stage. Units nest like the names
of their modules. In forward, a unit is all-gathered, computes, and is freed if it reshards. In backward, it is all-gathered
again, computes its gradients and is freed, and its gradients are reduced.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from crossframe.api import Api
from crossframe.dtypes import itemsize
from crossframe.errors import PlanError
from crossframe.layout import LAYOUTS, Layout, post_forward, post_forward_group, reduced_layout
from crossframe.mesh import PIPELINE, DataRanks, MeshSpec, ParallelMesh
from crossframe.precision import Precision, PrecisionPolicy
from crossframe.quoting import quote
from crossframe.reduction import ReductionStep, reduction_steps
from crossframe.step import Action, ModelStep, StepSettings, UnitStep
from crossframe.step.root_step import Do
from crossframe.step.settings import reshard_choice
from crossframe.strategy import Prefetch, Schedule, Strategy, Sync
from crossframe.trace import ALL_GATHER, ALL_REDUCE, CAST, COMPUTE, FREE, REDUCE_SCATTER, RESHARD_TO_GROUP, STEP, Event
from crossframe.unit_assignment import enclosing_unit
from crossframe.unshard import shard_is_full


@dataclass(frozen=True)
class PlannedBucket:
    """The uniform part of a unit (R11): its layout and its dtypes."""

    layout: Layout
    precision: Precision

    def __post_init__(self) -> None:
        if not isinstance(self.layout, LAYOUTS) or not isinstance(self.precision, Precision):
            raise PlanError(f"expected a layout and a Precision, got {quote(self.layout)} and {quote(self.precision)}")

    @property
    def trained(self) -> bool:
        """Whether any of its parameters requires a gradient."""
        return any(param.requires_grad for param in self.layout.params)


@dataclass(frozen=True)
class PlannedUnit:
    """A unit and its reshard settings.

    Attributes:
        name: its module; "" is the root.
        buckets: one bucket unless it mixes dtypes.
        reshard_after_forward: True frees the unsharded parameters between forward and backward, False keeps them, and an int k
            keeps the shard of a reshard group of k ranks (R08, R13, R14).
        keeps_full_unreduced: whether a backward without reduction keeps the unsharded parameters (R15).
        api: the API whose rules apply.
        has_experts: whether the axis "ep" of a mesh divides its parameters, so that they are not sharded over it (R39).
    """

    name: str
    buckets: tuple[PlannedBucket, ...]
    reshard_after_forward: bool | int
    keeps_full_unreduced: bool = False
    api: Api = Api.FSDP1
    has_experts: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise PlanError(f"expected the name of a unit as a string, got {quote(self.name)}")
        buckets = self.buckets
        if not isinstance(buckets, tuple) or not buckets or not all(isinstance(b, PlannedBucket) for b in buckets):
            raise PlanError(f"unit {self.name!r}: expected a tuple of at least one PlannedBucket, got {quote(buckets)}")
        if type(self.reshard_after_forward) not in (bool, int):
            raise PlanError(
                f"unit {self.name!r}: expected a bool or a number of ranks as reshard_after_forward, got "
                f"{quote(self.reshard_after_forward)}"
            )
        for name, value, kind in (
            ("keeps_full_unreduced", self.keeps_full_unreduced, bool),
            ("api", self.api, Api),
            ("has_experts", self.has_experts, bool),
        ):
            if not isinstance(value, kind):
                raise PlanError(f"unit {self.name!r}: expected a {kind.__name__} as {name}, got {quote(value)}")


def plan_units(
    layouts: Sequence[tuple[str, Layout]],
    strategy: Strategy = Strategy.FULL_SHARD,
    *,
    api: Api = Api.FSDP1,
    reshard_after_forward: bool | int | None = None,
    policy: PrecisionPolicy | None = None,
    expert_units: Collection[str] = (),
) -> tuple[PlannedUnit, ...]:
    """Units with a strategy, in forward order. Several layouts with one name are the buckets of one unit.

    Args:
        reshard_after_forward: None follows the strategy and keeps the root unsharded until backward. True, False or the size of
            the reshard group (FSDP2) also applies to the root (R13). The size of the shard group means True, and 1 means False.
        policy: precision of all units; None: dtypes as stored.
        expert_units: the units whose parameters the axis "ep" divides, as `ParallelModel.expert_units` names them.

    Raises:
        PlanError: an invalid choice.
        MeshError: a reshard group whose size does not divide the shard group.
    """
    if not (reshard_after_forward is None or type(reshard_after_forward) in (bool, int)):
        raise PlanError(
            f"reshard_after_forward: expected None, a bool or a number of ranks, got {quote(reshard_after_forward)}"
        )
    policy = PrecisionPolicy() if policy is None else policy
    _expect(("strategy", strategy, Strategy), ("api", api, Api), ("policy", policy, PrecisionPolicy))
    buckets: dict[str, list[PlannedBucket]] = {}
    for name, layout in _pairs(layouts):
        buckets.setdefault(name, []).append(PlannedBucket(layout, policy.resolve(layout.dtype)))
    units = []
    for name, members in buckets.items():
        settings = StepSettings.of_strategy(strategy, casts=any(member.precision.is_mixed for member in members))
        if name == "":
            settings = settings.as_root()
        if reshard_after_forward is not None:
            settings = replace(
                settings, reshard_after_forward=reshard_choice(reshard_after_forward, members[0].layout.world_size)
            )
        keeps = api is Api.FSDP1 and settings.keep_without_reduction
        has_experts = name in expert_units
        units.append(PlannedUnit(name, tuple(members), settings.reshard_after_forward, keeps, api, has_experts))
    return tuple(units)


def _expect(*wanted: tuple[str, object, type]) -> None:
    for name, value, kind in wanted:
        if not isinstance(value, kind):
            raise PlanError(f"{name}: expected a {kind.__name__}, got {quote(value)}")


def _pairs(layouts: Sequence[tuple[str, Layout]]) -> Sequence[tuple[str, Layout]]:
    pairs = isinstance(layouts, tuple | list) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in layouts)
    if not pairs or not all(isinstance(name, str) and isinstance(layout, LAYOUTS) for name, layout in layouts):
        raise PlanError(f"expected a list of (unit name, layout), got {quote(layouts)}")
    return layouts


def step_plan(
    units: Sequence[PlannedUnit],
    mesh: MeshSpec | ParallelMesh,
    rank: int = 0,
    *,
    backward_prefetch: Prefetch | None = Prefetch.BACKWARD_PRE,
    forward_prefetch: int = 0,
    microbatches: int = 1,
    sync: Sync = Sync.EACH,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
) -> list[Event]:
    """The events of one step on one rank, in issue order.

    On a mesh with model axes, units are those of the part of the model that the rank computes with, and the events are those of
    data parallelism (R39).

    With one shard, nothing is all-gathered and only copies are freed: a flat layout in full precision is already unsharded (R14).
    Gradients are summed over replicas after they are reduced over the shard group (R28).

    Args:
        units: in forward order. They reduce in the reverse order.
        backward_prefetch: when a unit's all-gather in backward is issued (R16); None: when it is needed.
        forward_prefetch: the number of units that forward prefetches.
        microbatches: the number of microbatches per optimizer step.
        sync: the microbatches that reduce gradients.
        schedule: the order of microbatches in a pipeline; without one, each has its forward and its backward in turn.

    Raises:
        PlanError: no units, layouts with another shard size than the mesh, counts that are too small, or a `sync` that the API or
            the mesh does not support.
    """
    if not isinstance(units, tuple | list) or not all(isinstance(unit, PlannedUnit) for unit in units):
        raise PlanError(f"expected a list of PlannedUnit, as plan_units gives them, got {quote(units)}")
    planner = _Planner(tuple(units), mesh, rank, backward_prefetch, forward_prefetch, microbatches, sync, schedule)
    return list(planner.step())


class _Planner:
    """Plans one rank's step: sends the step machine the signals of a model in which each unit runs once, and lists the events of
    its actions."""

    def __init__(
        self,
        units: tuple[PlannedUnit, ...],
        mesh: MeshSpec | ParallelMesh,
        rank: int,
        backward_prefetch: Prefetch | None,
        forward_prefetch: int,
        microbatches: int,
        sync: Sync,
        schedule: Schedule,
    ) -> None:
        if not isinstance(mesh, ParallelMesh):
            _expect(("mesh", mesh, MeshSpec))
        _expect(("sync", sync, Sync), ("schedule", schedule, Schedule))
        if backward_prefetch is not None:
            _expect(("backward_prefetch", backward_prefetch, Prefetch))
        mesh.coordinate(rank)  # refuses a rank outside the mesh
        self.rank, self.sync = rank, sync
        self.data = {has_experts: _data_ranks(mesh, rank, has_experts) for has_experts in (False, True)}
        _check(
            units, {has_experts: data.mesh for has_experts, data in self.data.items()}, forward_prefetch, microbatches
        )
        self.reductions = {
            has_experts: _reductions(data.mesh, api_of(units), sync) for has_experts, data in self.data.items()
        }
        self.last = microbatches - 1
        stage, num_stages = 0, 1
        if isinstance(mesh, ParallelMesh):
            stage, num_stages = mesh.coordinate(rank).get(PIPELINE, 0), mesh.size(PIPELINE)
        self.order = schedule.order(stage, num_stages, microbatches)
        known = frozenset(unit.name for unit in units)
        self.children: dict[str | None, list[PlannedUnit]] = {}
        for unit in units:
            parent = enclosing_unit(unit.name.rpartition(".")[0], known) if unit.name else None
            self.children.setdefault(parent if parent in known else None, []).append(unit)
        self.steps = {unit.name: _unit_step(unit, backward_prefetch) for unit in self._walk(None, outer_first=True)}
        self.planned = {self.steps[unit.name]: unit for unit in units}
        begun = list(self.steps.values())
        for i, step in enumerate(begun):
            step.forward_prefetch_units = tuple(begun[i + 1 : i + 1 + forward_prefetch])
        self.model = ModelStep(begun)
        self.differentiated = self._differentiated()
        self.microbatch = 0

    def _walk(self, parent: str | None, *, outer_first: bool) -> Iterator[PlannedUnit]:
        """The units in the order in which forwards begin (`outer_first`) or end."""
        for unit in self.children.get(parent, ()):
            if outer_first:
                yield unit
            yield from self._walk(unit.name, outer_first=outer_first)
            if not outer_first:
                yield unit

    def _differentiated(self) -> set[str]:
        """The units that backward reaches: from the first trained one on, in the order in which forwards end. Earlier units are
        frozen, and inputs are assumed not to require gradients."""
        ended = list(self._walk(None, outer_first=False))
        first = next((i for i, unit in enumerate(ended) if self.steps[unit.name].trained), len(ended))
        return {unit.name for unit in ended[first:]}

    def step(self) -> Iterator[Event]:
        for phase, microbatch in self.order:
            self.microbatch = microbatch
            for step in self.model.units:
                step.choose(reduce_grads=self.sync is not Sync.LAST or microbatch == self.last)
            if phase == "forward":
                yield from self._events(self.model.begin_step(training=True))
                for unit in self.children[None]:
                    yield from self._forward(unit)
            else:
                for unit in reversed(self.children[None]):
                    yield from self._backward(unit)
                yield from self._events(self.model.end_backward())
                self.model.leave_backward()
        first = self.planned[self.model.root]
        yield Event(STEP, "", "step", first.buckets[0].precision.stored, 0, (self.rank,), self.microbatch)

    def _forward(self, unit: PlannedUnit) -> Iterator[Event]:
        step = self.steps[unit.name]
        yield from self._events(self.model.begin_forward(step))
        for child in self.children.get(unit.name, ()):
            yield from self._forward(child)
        yield from self._compute(unit, "forward")
        yield from self._events(self.model.end_forward(step))
        if unit.name not in self.differentiated:
            self.model.needs_no_backward(step)

    def _backward(self, unit: PlannedUnit) -> Iterator[Event]:
        step, reached = self.steps[unit.name], unit.name in self.differentiated
        if reached:
            yield from self._events(self.model.begin_backward(step))
            yield from self._compute(unit, "backward")
        for child in reversed(self.children.get(unit.name, ())):
            yield from self._backward(child)
        if reached and step.trained:
            step.has_grads = True
            yield from self._events(self.model.gradients_complete(step))
        elif reached:
            yield from self._events(self.model.inputs_complete(step))

    def _events(self, do: Do) -> Iterator[Event]:
        for step, actions, phase in do:
            for action in actions:
                yield from self._of_action(self.planned[step], action, phase)

    def _of_action(self, unit: PlannedUnit, action: Action, phase: str) -> Iterator[Event]:
        """The events of an action, by bucket. Other actions are local to a rank."""
        data = self.data[unit.has_experts]
        shard_group = data.shard_group(self.rank)
        for at, bucket in enumerate(unit.buckets):
            dtype, layout = bucket.precision.gathered, bucket.layout
            numel = layout.gathered_numel
            match action:
                case Action.GATHER if not _is_shard(bucket):
                    kind = CAST if data.mesh.shard == 1 else ALL_GATHER
                    yield self._event(kind, unit, at, phase, dtype, numel, shard_group)
                case Action.GATHER_FROM_GROUP if not _is_shard(bucket):
                    size = int(unit.reshard_after_forward)
                    group, numel = (
                        data.of(post_forward_group(data.mesh, data.index(self.rank), size)),
                        post_forward(layout, size).gathered_numel,
                    )
                    yield self._event(ALL_GATHER, unit, at, phase, dtype, numel, group)
                case Action.RESHARD_TO_GROUP:
                    kept = post_forward(layout, int(unit.reshard_after_forward)).padded_shard_numel
                    yield self._event(RESHARD_TO_GROUP, unit, at, phase, dtype, numel - kept, shard_group)
                case Action.FREE if not _is_shard(bucket):
                    yield self._event(FREE, unit, at, phase, dtype, numel, shard_group)
                case Action.REDUCE if bucket.trained:
                    yield from self._reduce(unit, at, bucket)
                case _:
                    pass

    def _event(
        self, kind: str, unit: PlannedUnit, at: int, phase: str, dtype: str, numel: int, group: Sequence[int]
    ) -> Event:
        return Event(kind, unit.name, phase, dtype, numel * itemsize(dtype), group, self.microbatch, at)

    def _compute(self, unit: PlannedUnit, phase: str) -> Iterator[Event]:
        for at, bucket in enumerate(unit.buckets):
            numel = sum(param.numel for param in bucket.layout.params)
            yield self._event(COMPUTE, unit, at, phase, bucket.precision.gathered, numel, (self.rank,))

    def _reduce(self, unit: PlannedUnit, at: int, bucket: PlannedBucket) -> Iterator[Event]:
        dtype, layout = bucket.precision.reduced, reduced_layout(bucket.layout)
        data = self.data[unit.has_experts]
        early, last = self.reductions[unit.has_experts]
        steps = last if self.microbatch == self.last else early
        for step in steps:
            match step:
                case ReductionStep.REDUCE_SCATTER:
                    numel = layout.gathered_numel
                    yield self._event(REDUCE_SCATTER, unit, at, "backward", dtype, numel, data.shard_group(self.rank))
                case ReductionStep.ALL_REDUCE:
                    numel = layout.padded_shard_numel
                    yield self._event(ALL_REDUCE, unit, at, "backward", dtype, numel, data.replicate_group(self.rank))
                case (
                    ReductionStep.CAST_TO_REDUCED
                    | ReductionStep.DIVIDE_BEFORE
                    | ReductionStep.DIVIDE_BETWEEN
                    | ReductionStep.ADD_PARTIAL
                    | ReductionStep.KEEP_PARTIAL
                    | ReductionStep.DIVIDE_AFTER
                    | ReductionStep.CAST_TO_STORED
                    | ReductionStep.ACCUMULATE
                ):
                    pass  # local to a rank
                case _:
                    assert_never(step)


def _is_shard(bucket: PlannedBucket) -> bool:
    """Whether its unsharded parameters are the shard itself (R14)."""
    return shard_is_full(bucket.layout, cast=bucket.precision.is_mixed)


def _unit_step(unit: PlannedUnit, backward_prefetch: Prefetch | None) -> UnitStep:
    settings = StepSettings(
        reshard_after_forward=unit.reshard_after_forward,
        keep_without_reduction=unit.keeps_full_unreduced,
        backward_prefetch=backward_prefetch,
    )
    return UnitStep(unit.name, settings, trained=any(bucket.trained for bucket in unit.buckets))


def api_of(units: Sequence[PlannedUnit]) -> Api:
    """The common API of units; PlanError without units or with both APIs."""
    apis = {unit.api for unit in units}
    if not apis:
        raise PlanError("a model needs at least one unit, got none")
    if len(apis) > 1:
        raise PlanError(f"units of one model have one API: {[(unit.name, unit.api.value) for unit in units]}")
    return apis.pop()


def _data_ranks(mesh: MeshSpec | ParallelMesh, rank: int, has_experts: bool) -> DataRanks:
    if isinstance(mesh, ParallelMesh):
        return mesh.data_ranks(rank, experts=has_experts)
    return DataRanks(mesh, range(mesh.world_size))


def _reductions(mesh: MeshSpec, api: Api, sync: Sync) -> tuple[Sequence[ReductionStep], Sequence[ReductionStep]]:
    """The steps of a reduction: of microbatches before the last one, and of the last one."""
    last = reduction_steps(mesh, api)
    match sync:
        case Sync.EACH:
            return last, last
        case Sync.LAST:
            return (), last
        case Sync.ALL_REDUCE_LAST:
            return reduction_steps(mesh, api, all_reduce=False), last
        case _:
            assert_never(sync)


def _check(
    units: Sequence[PlannedUnit], meshes: Mapping[bool, MeshSpec], forward_prefetch: int, microbatches: int
) -> None:
    names = [unit.name for unit in units]
    if len(set(names)) != len(names):
        raise PlanError(f"a unit stands twice among {names}: give its layouts to plan_units together")
    for name, value, least in (("forward_prefetch", forward_prefetch, 0), ("microbatches", microbatches, 1)):
        if type(value) is not int or value < least:
            raise PlanError(f"{name}: expected a number of at least {least}, got {quote(value)}")
    for unit in units:
        for bucket in unit.buckets:
            if bucket.layout.world_size != (shard := meshes[unit.has_experts].shard):
                raise PlanError(
                    f"unit {unit.name!r} is laid out over {bucket.layout.world_size} ranks, the mesh shards over {shard}"
                )
