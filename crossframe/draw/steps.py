"""The content of a drawing of a plan: lanes of bars, waiting times, and phases."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from crossframe.cost import Cost, Span
from crossframe.draw.amounts import ROOT, bytes_text, one_line, ranks_text, seconds_text
from crossframe.errors import PlanError
from crossframe.quoting import quote
from crossframe.trace import ALL_GATHER, ALL_REDUCE, COLLECTIVES, COMPUTE, REDUCE_SCATTER, STEP, Event

COMPUTE_LANE, SHARD_LANE, EXPERT_LANE, RESHARD_LANE, REPLICA_LANE = (
    "compute",
    "shard group",
    "expert shards",
    "reshard group",
    "replicas",
)
WAITING = "waiting"
# The names of kinds in tables and legends.
WORDS = {
    "forward": "forward",
    "backward": "backward",
    WAITING: "waiting",
    ALL_GATHER: "all-gather",
    REDUCE_SCATTER: "reduce-scatter",
    ALL_REDUCE: "all-reduce",
}


@dataclass(frozen=True)
class Bar:
    """An operation in time. `kind` is a key of WORDS, `unit` the unit's name in one line, and `about` a full description."""

    start: float
    stop: float
    kind: str
    unit: str
    about: str


def check_cost(cost: Cost) -> None:
    """Raise PlanError unless this is the cost of a plan with events."""
    if not isinstance(cost, Cost):
        raise PlanError(f"expected the cost of a plan, as step_cost gives it, got {quote(cost)}")
    if not cost.spans:
        raise PlanError("expected the cost of a plan, got one without events")


def rank_of(cost: Cost) -> int:
    """The rank of the step, which is the only rank in the groups of its computations."""
    return next(span.event.group[0] for span in cost.spans if span.event.kind in (COMPUTE, STEP))


def unit_text(event: Event) -> str:
    """The unit of an event, in one line."""
    return one_line(event.unit) or ROOT


def lanes(cost: Cost) -> dict[str, list[Bar]]:
    """The bars of a step by lane, in the order of time, without empty lanes other than "compute"."""
    names = (COMPUTE_LANE, SHARD_LANE, EXPERT_LANE, RESHARD_LANE, REPLICA_LANE)
    found: dict[str, list[Bar]] = {name: [] for name in names}
    shard_group: dict[str, int] = {}  # of each unit; that of experts is smaller than the others'
    for event in (span.event for span in cost.spans if span.event.kind in (ALL_GATHER, REDUCE_SCATTER)):
        shard_group[event.unit] = max(len(event.group), shard_group.get(event.unit, 0))
    largest = max(shard_group.values(), default=1)
    done = 0.0
    for span in cost.spans:
        event = span.event
        if event.kind in (COMPUTE, STEP):
            if span.start_seconds > done:
                found[COMPUTE_LANE].append(_waiting(done, span))
            done = span.stop_seconds
        if event.kind == COMPUTE:
            found[COMPUTE_LANE].append(_bar(span, event.phase))
        elif event.kind == ALL_REDUCE:
            found[REPLICA_LANE].append(_bar(span, event.kind))
        elif event.kind in COLLECTIVES:
            in_reshard_group = len(event.group) < shard_group[event.unit]
            whole = SHARD_LANE if len(event.group) == largest else EXPERT_LANE
            found[RESHARD_LANE if in_reshard_group else whole].append(_bar(span, event.kind))
    return {name: bars for name, bars in found.items() if bars or name == COMPUTE_LANE}


def _bar(span: Span, kind: str) -> Bar:
    event = span.event
    unit, seconds = unit_text(event), span.stop_seconds - span.start_seconds
    what = f"{WORDS[kind]} of {unit}, microbatch {event.microbatch}"
    when = f"{seconds_text(seconds)}, from {seconds_text(span.start_seconds)} on"
    if event.kind == COMPUTE:
        return Bar(span.start_seconds, span.stop_seconds, kind, unit, f"{what}\n{when}")
    size = f"{bytes_text(event.num_bytes)} of {event.dtype} in {event.phase}, among ranks {ranks_text(event.group)}"
    return Bar(span.start_seconds, span.stop_seconds, kind, unit, f"{what}\n{size}\n{when}")


def _waiting(since: float, until: Span) -> Bar:
    before = "the optimizer's step" if until.event.kind == STEP else f"{until.event.phase} of {unit_text(until.event)}"
    waited = seconds_text(until.start_seconds - since)
    return Bar(since, until.start_seconds, WAITING, "", f"waiting {waited} for communication, before {before}")


def sampled(bars: Sequence[Bar], total: float, num_cells: int) -> list[str]:
    """A kind for each of `num_cells` equal intervals of time; "" if nothing runs.

    If several kinds share an interval, the one is chosen that was chosen least so far in relation to its time. Each kind
    therefore appears in proportion to its time, even if its bars are shorter than an interval.

    >>> sampled([Bar(0, 5, "forward", "", ""), Bar(5, 6, "waiting", "", "")], 8, 4)
    ['forward', 'forward', 'forward', '']
    """
    shares: list[dict[str, float]] = [{} for _ in range(num_cells)]
    for bar in bars:
        start, stop = bar.start / total * num_cells, bar.stop / total * num_cells
        for cell in range(min(num_cells - 1, int(start)), min(num_cells, int(stop) + 1)):
            share = min(stop, cell + 1) - max(start, cell)
            if share > 0:
                shares[cell][bar.kind] = shares[cell].get(bar.kind, 0.0) + share
    owed: dict[str, float] = {}
    taken = []
    for here in shares:
        idle = 1 - sum(here.values())
        if idle > 1e-9:
            here[""] = idle
        for kind, share in here.items():
            owed[kind] = owed.get(kind, 0.0) + share
        kind = max(here, key=lambda kind: owed[kind])
        owed[kind] -= 1
        taken.append(kind)
    return taken


@dataclass(frozen=True)
class Phase:
    """The forward or backward of a microbatch, from the end of the previous phase to the end of its computations. The last phase
    extends to the end of the step."""

    microbatch: int
    name: str
    start: float
    stop: float


def phases(cost: Cost) -> list[Phase]:
    """The consecutive phases of a step, from 0 to its end."""
    found: list[Phase] = []
    for span in cost.spans:
        event = span.event
        if event.kind != COMPUTE:
            continue
        if found and (found[-1].microbatch, found[-1].name) == (event.microbatch, event.phase):
            found[-1] = replace(found[-1], stop=span.stop_seconds)
        else:
            start = found[-1].stop if found else 0.0
            found.append(Phase(event.microbatch, event.phase, start, span.stop_seconds))
    if found:
        found[-1] = replace(found[-1], stop=step_seconds(cost))
    return found


def step_seconds(cost: Cost) -> float:
    """The time at which the last operation is done. It is the length of the step, since the optimizer waits for everything."""
    return max(span.stop_seconds for span in cost.spans)
