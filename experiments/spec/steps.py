"""R13-R16, R28: the plan of a step beside the collectives of torch's FSDP, in order, and beside what it keeps in memory."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from crossframe.api import Api
from crossframe.dtypes import itemsize
from crossframe.strategy import Sync
from crossframe.trace import ALL_GATHER, ALL_REDUCE, CAST, FREE, RESHARD_TO_GROUP, Event, collectives
from experiments.spec.checks import Scope
from experiments.spec.step_cases import Step, flat_steps, per_param_steps
from experiments.spec.tally import Tallies
from experiments.spec.torch_steps import Held, run_step
from experiments.spec.watch import Sent, planned

PADDED_GROUP = (
    "torch gathers its padded buffer from the reshard group where dim 0 is uneven; the core gathers the parameter's own "
    "chunks, which are fewer elements"
)
PADDED_REPLICAS = (
    "torch's FSDP1 pads the tail of a flat parameter to a multiple of its ranks under NO_SHARD too, where nothing is cut; the "
    "core's layout over one shard has no tail, and so its all-reduce is that much shorter"
)
CAST_AGAIN = (
    "under NO_SHARD torch's FSDP1 frees the low-precision copy behind every forward and backward and casts again; in the core's "
    "plan the root, and every unit of a strategy that does not reshard after forward, keeps it into backward"
)
ONE_SHARD = (
    "torch's FSDP1 takes hybrid sharding with one shard as NO_SHARD inside a group of one rank: nothing is summed over the "
    "replicas, and each keeps its own gradient divided by their number; the core averages over them"
)
PREFETCHED_VIEWS = (
    "torch's FSDP1 makes the views of a unit when it gathers it, so that autograd comes later to those of a unit prefetched in "
    "the middle of another's forward, and its reduction is issued after a gather that the plan has later; gathers and "
    "reductions, each in their own order, are the plan's"
)


def flat_plans(tallies: Tallies, scope: Scope) -> None:
    """FSDP1: what one rank sends in a step, and what it keeps in full between forward and backward and after backward."""
    for step in scope.take(flat_steps(), num_quick=12):
        _compare(tallies, step)


def per_param_plans(tallies: Tallies, scope: Scope) -> None:
    """FSDP2: the same."""
    for step in scope.take(per_param_steps(), num_quick=12):
        _compare(tallies, step)


def _compare(tallies: Tallies, step: Step) -> None:
    sent, torchs_held = run_step(step)
    plan = step.plan()
    ours, held = planned(plan), held_by_plan(step, plan)
    counts = tallies["R14" if step.sync is Sync.EACH else "R15"]
    unsharded = step.api is Api.FSDP1 and step.mesh.shard == 1
    if unsharded and step.strategy.is_hybrid and step.mesh.replicate > 1:
        if not sent and {one.kind for one in ours} == {ALL_REDUCE}:
            tallies["R14"].explain(ONE_SHARD, step)
        else:
            counts.compare(ours, sent, step)
        return
    if ours != sent and (type(step.reshard_after_forward) is int or unsharded):
        # As torch pads, so that everything else can still be compared.
        ours = [one._replace(num_bytes=_padded(step, event)) for one, event in zip(ours, _shown(plan), strict=True)]
        if ours == sent:
            counts.explain(PADDED_REPLICAS if unsharded else PADDED_GROUP, step)
    counts.compare(Counter(ours), Counter(sent), step)
    if unsharded and step.low and not any(torchs_held) and held != torchs_held:
        counts.explain(CAST_AGAIN, step)
    elif torchs_held:
        counts.compare(held, torchs_held, (step, "in full"))
        if "" in step.nest:
            tallies["R13"].compare("" in held[0], "" in torchs_held[0], step)
    if step.mesh.replicate > 1:
        tallies["R28"].compare(_reductions(ours), _reductions(sent), step)
    if ours != sent and _prefetched_views(step, ours, sent):
        tallies["R16"].explain(PREFETCHED_VIEWS, step)
    else:
        tallies["R16"].compare(ours, sent, step)


def _shown(plan: Sequence[Event]) -> list[Event]:
    return [event for event in collectives(plan) if len(event.group) > 1]


def _padded(step: Step, event: Event) -> int:
    """Bytes as torch pads: a gather from a reshard group is as large as one from all ranks, and under NO_SHARD a flat parameter
    is a multiple of all ranks."""
    (unit,) = [unit for unit in step.units() if unit.name == event.unit]
    layout, size = unit.buckets[0].layout, itemsize(event.dtype)
    if step.api is Api.FSDP2:
        return layout.gathered_numel * size if event.kind == ALL_GATHER else event.num_bytes
    ranks = step.mesh.replicate if step.keep_original else 1
    return -(-layout.gathered_numel // ranks) * ranks * size


def held_by_plan(step: Step, plan: Sequence[Event]) -> Held:
    """Which units a plan leaves in full behind each forward and each backward; all, where they are the truth themselves."""
    full = set(step.nest) if step.mesh.shard == 1 and not step.low else set()
    found: Held = []
    for event, following in zip(plan, [*plan[1:], None], strict=True):
        if event.kind in (ALL_GATHER, CAST):
            full.add(event.unit)
        elif event.kind in (FREE, RESHARD_TO_GROUP):
            full.discard(event.unit)
        if following and (event.microbatch, event.phase) != (following.microbatch, following.phase):
            found.append(frozenset(full))
    return found


def _reductions(sent: Sequence[Sent]) -> list[Sent]:
    return [one for one in sent if one.kind != ALL_GATHER]


def _prefetched_views(step: Step, ours: list[Sent], sent: list[Sent]) -> bool:
    """Whether nothing but the reductions' places among the gathers differs, and without forward prefetch not even these."""
    if step.api is not Api.FSDP1 or not step.forward_prefetch or _reductions(ours) != _reductions(sent):
        return False
    gathers = [[one for one in side if one.kind == ALL_GATHER] for side in (ours, sent)]
    without = replace(step, forward_prefetch=0)
    return gathers[0] == gathers[1] and planned(without.plan()) == run_step(without)[0]
