"""What happens in a step, as events, whether planned or seen; and how two lists of events differ."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"
ALL_REDUCE = "all_reduce"
COLLECTIVES = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)  # what steps are made of
ALL_TO_ALL = "all_to_all"  # shards go over to another layout (R36): between steps, and in no plan

FREE = "free"  # the full parameters are given back
RESHARD_TO_GROUP = "reshard_to_group"  # all of them but a smaller group's shard (R08)
CAST = "cast"  # a copy that serves as full parameters is made where there is nothing to gather
COMPUTE = "compute"  # the unit's forward or backward
STEP = "step"  # the optimizer

COMPARED = (*COLLECTIVES, FREE, RESHARD_TO_GROUP)  # what an engine does that its plan says


@dataclass(frozen=True)
class Event:
    """One thing that one rank does.

    Attributes:
        kind: one of the kinds above.
        unit: the unit that it is done for; "" is the root.
        phase: "forward", "backward" or "step"; of what a backend does between steps, "summon" or "state".
        dtype: dtype of what travels, is freed, or is computed with.
        num_bytes: bytes of the unsharded side on one rank: what an all-gather fills, a reduce-scatter or an all-reduce takes
            in, a free gives back, a computation reads of its parameters. Of an all-to-all: what this rank takes in.
        group: the ranks that take part. Evenly spaced ranks are kept as a `range`, whose size does not grow with them.
        microbatch: which of the step's microbatches it belongs to.
        bucket: which bucket of the unit. Neither counts when two events are compared: who watches a backend cannot tell.
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
            object.__setattr__(self, "group", _compact(tuple(self.group)))

    def to_json(self) -> dict:
        """The event as a JSON object."""
        return asdict(self) | {"group": list(self.group)}

    @classmethod
    def from_json(cls, fields: dict) -> "Event":
        """The event that `to_json` wrote."""
        names = ("kind", "unit", "phase", "dtype", "num_bytes")
        later = {name: fields[name] for name in ("microbatch", "bucket") if name in fields}
        return cls(*(fields[name] for name in names), group=tuple(fields["group"]), **later)


def _compact(ranks: tuple[int, ...]) -> Sequence[int]:
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    even = range(ranks[0], ranks[0] + step * len(ranks), step) if ranks and step else None
    return even if even is not None and tuple(even) == ranks else ranks


def collectives(events: Iterable[Event]) -> list[Event]:
    """The events that move data between ranks."""
    return [event for event in events if event.kind in COLLECTIVES]


def summary(events: Iterable[Event]) -> dict[str, dict[str, int]]:
    """Count and bytes by kind of collective, those that do not occur included.

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
    """What two traces do not share, one line each; empty when they are equal.

    Args:
        ordered: compare position by position. Otherwise as multisets: for a compiler, which orders as it likes.
        kinds: which events to compare. COLLECTIVES for a trace that cannot show when memory is given back: one that was read
            from a compiled program, or from a recording.
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
