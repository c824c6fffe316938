"""Events of a step, planned or observed, and the difference of two lists of events."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

from crossframe.mesh import as_range

ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"
ALL_REDUCE = "all_reduce"
COLLECTIVES = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)  # the collectives of a step
# Never in a plan: moves shards to another layout between steps (R36), or tokens to experts.
ALL_TO_ALL = "all_to_all"
SEND = "send"  # from one rank to another; never in a plan

FREE = "free"  # frees the full parameters
RESHARD_TO_GROUP = "reshard_to_group"  # frees the full parameters except the part kept in a reshard group (R08)
CAST = "cast"  # makes a copy as full parameters, on a mesh with one shard
COMPUTE = "compute"  # the unit's forward or backward
STEP = "step"  # the optimizer

COMPARED = (*COLLECTIVES, FREE, RESHARD_TO_GROUP)  # the kinds that both plans and traces of engines have


@dataclass(frozen=True)
class Event:
    """One operation of one rank.

    Attributes:
        kind: one of the kinds above.
        unit: the unit of the operation; "" is the root.
        phase: "forward", "backward" or "step"; between steps "summon" or "state".
        dtype: dtype of the data that is sent, freed or computed with.
        num_bytes: bytes of the unsharded side on one rank: the output of an all-gather, the input of a reduce-scatter or an
            all-reduce, the memory that is freed, the parameters that a computation reads. For an all-to-all: the output.
        group: the ranks that take part. Evenly spaced ranks are stored as a `range`, whose size does not grow with them.
        microbatch: index of the microbatch. Ignored when events are compared, since an observer of a backend does not know it.
        bucket: index of the bucket in the unit. Ignored likewise.
    """

    kind: str
    unit: str
    phase: str
    dtype: str
    num_bytes: int
    group: Sequence[int]
    microbatch: int = field(default=0, compare=False)
    bucket: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.group, range):
            object.__setattr__(self, "group", as_range(tuple(self.group)))

    def to_json(self) -> dict:
        """The event as a JSON object."""
        return asdict(self) | {"group": list(self.group)}

    @classmethod
    def from_json(cls, fields: dict) -> "Event":
        """The event that `to_json` wrote."""
        names = ("kind", "unit", "phase", "dtype", "num_bytes")
        later = {name: fields[name] for name in ("microbatch", "bucket") if name in fields}
        return cls(*(fields[name] for name in names), group=tuple(fields["group"]), **later)


def collectives(events: Iterable[Event]) -> list[Event]:
    """The events that are collectives."""
    return [event for event in events if event.kind in COLLECTIVES]


def summary(events: Iterable[Event]) -> dict[str, dict[str, int]]:
    """Count and bytes of each kind of collective, including kinds that do not occur.

    >>> summary([Event(ALL_GATHER, "", "forward", "float32", 8, (0, 1))])["all_gather"]
    {'count': 1, 'num_bytes': 8}
    """
    result = {kind: {"count": 0, "num_bytes": 0} for kind in COLLECTIVES}
    for event in collectives(events):
        result[event.kind]["count"] += 1
        result[event.kind]["num_bytes"] += event.num_bytes
    return result


def difference(
    expected: Sequence[Event], seen: Sequence[Event], *, ordered: bool, kinds: Sequence[str] = COMPARED
) -> list[str]:
    """The differences between two traces, one line for each; empty if they are equal.

    Args:
        ordered: compare position by position; otherwise as multisets, for compilers that choose the order.
        kinds: the kinds of events to compare. Use COLLECTIVES for traces that do not show when memory is freed: those read from
            a compiled program or a recording.
    """
    a, b = ([event for event in events if event.kind in kinds] for events in (expected, seen))
    if ordered:
        lines = [f"event {i}: expected {x}, seen {y}" for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
        if len(a) != len(b):
            lines.append(f"expected {len(a)} events, seen {len(b)}")
        return lines
    missing, extra = Counter(a) - Counter(b), Counter(b) - Counter(a)
    return [f"missing {n} x {event}" for event, n in missing.items()] + [
        f"unexpected {n} x {event}" for event, n in extra.items()
    ]
