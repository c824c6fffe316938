"""A training step as a list of events, computed from the layouts alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from crossframe.dtypes import itemsize
from crossframe.errors import PlanError
from crossframe.layout import Layout
from crossframe.mesh import MeshSpec
from crossframe.precision import Precision, resolve_precision
from crossframe.trace import ALL_GATHER, ALL_REDUCE, FREE, REDUCE_SCATTER, Event


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
    """Units under a strategy, given in the order of forward. The root, "", stays full into backward (R13)."""
    return tuple(
        PlannedUnit(name, layout, strategy.reshards_after_forward and name != "", resolve_precision(layout.dtype))
        for name, layout in layouts
    )


def step_plan(
    units: Sequence[PlannedUnit], mesh: MeshSpec, rank: int = 0, *, backward_prefetch: bool = True
) -> list[Event]:
    """The events of one forward and backward on one rank.

    Units come in the order in which forward reaches them, the root first, since its forward surrounds the others'; they
    reduce in the reverse order. With `backward_prefetch` a unit's gather is issued before the reduction of the unit behind
    it (R16). On a mesh of replicas the sharded gradients are summed over these once they are reduced (R28).

    Raises:
        PlanError: no units, or layouts that are not of the mesh's shard size.
    """
    if not units:
        raise PlanError("a step needs at least one unit, got none")
    group, replicas = mesh.shard_group(rank), mesh.replicate_group(rank)
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
    full = [not unit.reshard_after_forward for unit in behind]
    for i, unit in enumerate(behind):
        for j in range(i, min(i + 1 + backward_prefetch, len(behind))):
            if not full[j]:
                full[j] = True
                events.append(event(ALL_GATHER, behind[j], "backward"))
        events.append(event(FREE, unit, "backward"))
        if unit.trained:
            events.append(event(REDUCE_SCATTER, unit, "backward"))
            if mesh.replicate > 1:
                reduced = unit.precision.reduced
                num_bytes = unit.layout.padded_shard_numel * itemsize(reduced)
                events.append(Event(ALL_REDUCE, unit.name, "backward", reduced, num_bytes, replicas))
    return events
