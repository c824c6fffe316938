"""The collectives of a step, planned and recorded."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from crossframe.plan import plan_units, step_plan
from crossframe.precision import PrecisionPolicy
from crossframe.recording import Recording, common_steps
from crossframe.strategy import Strategy, Sync
from crossframe.trace import ALL_GATHER, COLLECTIVES, Event, collectives, difference, summary

STEP, RANK = 0, 0


def plans(recording: Recording) -> list[list[Event]]:
    """The collectives of rank 0 in a step, computed from the layouts in the manifest and from what is known of precision and of
    microbatches. Of several microbatches there are two plans, for gradients reduced after the last one and after each."""
    manifest, settings = recording.manifest, recording.manifest.settings
    policy = PrecisionPolicy(param_dtype=settings.get("param_dtype"), reduce_dtype=settings.get("reduce_dtype"))
    units = plan_units(recording.layouts(), Strategy(manifest.strategy), policy=policy)
    microbatches = recording.num_microbatches
    syncs = (Sync.LAST, Sync.EACH) if microbatches > 1 else (Sync.EACH,)
    return [collectives(step_plan(units, manifest.mesh, RANK, microbatches=microbatches, sync=sync)) for sync in syncs]


def trace_of(name_a: str, a: Recording, name_b: str, b: Recording) -> dict[str, Any] | None:
    """`{"plan", name_a, name_b, "equal"}`: summaries of step 0 on rank 0; None unless both recorded collectives.

    "equal" asks that each run did what was planned for it. The plan that is shown is that of `a`.
    """
    if not common_steps(a, b):
        return None
    seen = [collectives(recording.collectives(STEP, RANK)) for recording in (a, b)]
    if not all(seen):
        return None
    followed = [followed_plan(recording) for recording in (a, b)]
    shown = followed[0] or plans(a)[0]
    return {"plan": summary(shown), name_a: summary(seen[0]), name_b: summary(seen[1]), "equal": all(followed)}


def followed_plan(recording: Recording) -> list[Event] | None:
    """The plan that the collectives of a run followed, or None. They are compared as multisets, since a compiler orders as it
    likes, without those of the loss function itself. A program of JAX does not gather again what backward does not need, such as
    biases.
    """
    units = dict(recording.layouts())
    seen = [event for event in recording.collectives(STEP, RANK) if event.unit in units]
    is_compiled = recording.manifest.framework == "jax"
    for plan in plans(recording):
        needed = _as_needed(plan, seen) if is_compiled else plan
        if not difference(needed, seen, ordered=False, kinds=COLLECTIVES):
            return plan
    return None


def _as_needed(plan: Sequence[Event], seen: Sequence[Event]) -> list[Event]:
    """The plan as a program in JAX follows it: a gather in backward is left out if it was not seen, and replaced by the seen one
    if that gathers fewer bytes."""
    gathers = [event for event in seen if _is_in_backward(event)]
    found = []
    for event in plan:
        if not _is_in_backward(event):
            found.append(event)
        elif parts := [each for each in gathers if _is_part(each, event)]:
            gathers.remove(parts[0])
            found.append(parts[0])
    return found


def _is_in_backward(event: Event) -> bool:
    return event.kind == ALL_GATHER and event.phase == "backward"


def _is_part(part: Event, whole: Event) -> bool:
    return part.num_bytes <= whole.num_bytes and replace(part, num_bytes=whole.num_bytes) == whole


def trace_table(traces: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The trace to show: the first that deviates from its plan, otherwise the first."""
    return next((trace for trace in traces if not trace["equal"]), traces[0] if traces else None)
