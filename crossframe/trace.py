"""What happens in a step, as events, whether planned or seen; and how two lists of events differ."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"
ALL_REDUCE = "all_reduce"
FREE = "free"
COLLECTIVES = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)


@dataclass(frozen=True)
class Event:
    """One thing that one rank does.

    Attributes:
        kind: ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE or FREE.
        unit: the unit that it is done for; "" is the root.
        phase: "forward" or "backward".
        dtype: dtype of what travels, or of what is freed.
        num_bytes: bytes of the unsharded side on one rank: what an all-gather fills, a reduce-scatter or an all-reduce takes
            in, a free gives back.
        group: the ranks that take part.
    """

    kind: str
    unit: str
    phase: str
    dtype: str
    num_bytes: int
    group: tuple[int, ...]

    def to_json(self) -> dict:
        """The event as a JSON object."""
        return asdict(self) | {"group": list(self.group)}

    @classmethod
    def from_json(cls, fields: dict) -> "Event":
        """The event that `to_json` wrote."""
        names = ("kind", "unit", "phase", "dtype", "num_bytes")
        return cls(*(fields[name] for name in names), group=tuple(fields["group"]))


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


def difference(expected: Sequence[Event], seen: Sequence[Event], *, ordered: bool) -> list[str]:
    """What the collectives of two traces do not share, one line each; empty when they are equal.

    Args:
        ordered: compare position by position. Otherwise as multisets: for a compiler, which orders as it likes.
    """
    a, b = collectives(expected), collectives(seen)
    if ordered:
        lines = [f"event {i}: expected {x}, seen {y}" for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
        if len(a) != len(b):
            lines.append(f"expected {len(a)} collectives, seen {len(b)}")
        return lines
    missing, extra = Counter(a) - Counter(b), Counter(b) - Counter(a)
    return [f"missing {n} x {event}" for event, n in missing.items()] + [
        f"unexpected {n} x {event}" for event, n in extra.items()
    ]
