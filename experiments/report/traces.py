"""The collectives of a step: what the plan says, and what two runs did."""

from collections.abc import Sequence
from typing import Any

from crossframe.plan import plan_units, step_plan
from crossframe.precision import PrecisionPolicy
from crossframe.recording import Recording
from crossframe.strategy import Strategy, Sync
from crossframe.trace import COLLECTIVES, Event, collectives, difference, summary

STEP, RANK = 0, 0


def planned(recording: Recording) -> list[Event]:
    """The collectives of rank 0 in a step, computed from the layouts in the manifest and from what its settings say of precision
    and of microbatches."""
    manifest, settings = recording.manifest, recording.manifest.settings
    policy = PrecisionPolicy(param_dtype=settings.get("param_dtype"), reduce_dtype=settings.get("reduce_dtype"))
    units = plan_units(recording.layouts(), Strategy(manifest.strategy), policy=policy)
    microbatches = settings.get("accumulate", 1)
    sync = Sync.LAST if microbatches > 1 else Sync.EACH
    return collectives(step_plan(units, manifest.mesh, RANK, microbatches=microbatches, sync=sync))


def trace_of(name_a: str, a: Recording, name_b: str, b: Recording) -> dict[str, Any] | None:
    """`{"plan", name_a, name_b, "equal"}`: summaries of step 0 on rank 0; None unless both recorded collectives.

    "equal" asks that each run did what was planned for it, as multisets: a compiler orders as it likes. The plan that is shown
    is that of `a`.
    """
    if min(a.num_steps, b.num_steps) == 0:
        return None
    seen = [collectives(recording.collectives(STEP, RANK)) for recording in (a, b)]
    if not all(seen):
        return None
    plans = [planned(recording) for recording in (a, b)]
    equal = all(
        not difference(plan, events, ordered=False, kinds=COLLECTIVES) for plan, events in zip(plans, seen, strict=True)
    )
    return {"plan": summary(plans[0]), name_a: summary(seen[0]), name_b: summary(seen[1]), "equal": equal}


def trace_table(traces: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The one to show of several: the first that is not as planned, else the first."""
    return next((trace for trace in traces if not trace["equal"]), traces[0] if traces else None)
