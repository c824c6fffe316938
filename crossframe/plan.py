"""A training step as a list of events, computed from the layouts alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from crossframe.dtypes import itemsize
from crossframe.errors import PlanError
from crossframe.layout import Layout
from crossframe.mesh import MeshSpec
from crossframe.precision import Precision, resolve_precision
from crossframe.trace import ALL_GATHER, FREE, REDUCE_SCATTER, Event


class Strategy(Enum):
    """When a unit's full parameters are freed (R14)."""

    FULL_SHARD = "full_shard"
    SHARD_GRAD_OP = "shard_grad_op"

    @property
    def reshards_after_forward(self) -> bool:
        """Whether full parameters are freed between forward and backward."""
        return self is Strategy.FULL_SHARD


@dataclass(frozen=True)
class PlannedUnit:
    """A unit with its layout, in the order in which forward reaches it; `reshard_after_forward` is its own (R13)."""

    name: str
    layout: Layout
    reshard_after_forward: bool
    precision: Precision

    @property
    def trained(self) -> bool:
        """Whether any of its parameters takes a gradient."""
        return any(param.requires_grad for param in self.layout.params)


def plan_units(layouts: Sequence[tuple[str, Layout]], strategy: Strategy) -> tuple[PlannedUnit, ...]:
    """Units under a strategy, given in the order of forward. The first is the root: it stays full into backward (R13)."""
    return tuple(
        PlannedUnit(name, layout, strategy.reshards_after_forward and i > 0, resolve_precision(layout.dtype))
        for i, (name, layout) in enumerate(layouts)
    )


def step_plan(
    units: Sequence[PlannedUnit], mesh: MeshSpec, rank: int = 0, *, backward_prefetch: bool = True
) -> list[Event]:
    """The events of one forward and backward on one rank.

    The first unit is the root, whose forward surrounds the others': it gathers first and reduces last. With
    `backward_prefetch` a unit's gather is issued before the reduction of the unit behind it (R16).

    Raises:
        PlanError: no units, or layouts that are not of the mesh's shard size.
    """
    if not units:
        raise PlanError("a step needs at least one unit, got none")
    group = mesh.shard_group(rank)
    for unit in units:
        if unit.layout.world_size != mesh.shard:
            raise PlanError(
                f"unit {unit.name!r} is laid out over {unit.layout.world_size} ranks, the mesh shards over {mesh.shard}"
            )

    def event(kind: str, unit: PlannedUnit, phase: str) -> Event:
        dtype = unit.precision.reduced if kind == REDUCE_SCATTER else unit.precision.gathered
        return Event(kind, unit.name, phase, dtype, unit.layout.gathered_numel * itemsize(dtype), group)

    events = []
    for unit in units:
        events.append(event(ALL_GATHER, unit, "forward"))
        if unit.reshard_after_forward:
            events.append(event(FREE, unit, "forward"))
    behind = list(reversed(units))
    gathered = {unit.name for unit in units if not unit.reshard_after_forward}
    for i, unit in enumerate(behind):
        ahead = [unit, *behind[i + 1 : i + 2]] if backward_prefetch else [unit]
        for other in ahead:
            if other.name not in gathered:
                gathered.add(other.name)
                events.append(event(ALL_GATHER, other, "backward"))
        events.append(event(FREE, unit, "backward"))
        if unit.trained:
            events.append(event(REDUCE_SCATTER, unit, "backward"))
    return events
