"""Formats the timeline and the cost of a step as plain text."""

import math
from collections.abc import Iterator
from textwrap import fill, wrap

from crossframe.cost import Cost
from crossframe.draw.amounts import TIMES, bytes_text, percent_text, ranks_text, seconds_text
from crossframe.draw.steps import (
    WAITING,
    WORDS,
    check_cost,
    lanes,
    phases,
    sampled,
    step_seconds,
    unit_text,
)
from crossframe.draw.table import aligned
from crossframe.trace import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER

_LETTERS = {
    "forward": "F",
    "backward": "B",
    WAITING: ".",
    ALL_GATHER: "g",
    REDUCE_SCATTER: "r",
    ALL_REDUCE: "a",
}
_INDENT = 15
HEIGHTS = "▁▂▃▄▅▆▇█"


def plan_text(cost: Cost, *, width: int = 100) -> str:
    """A step in a few lines: its communication, its time, its peak memory, and a timeline.

    Each letter of the timeline represents an interval of time. The last line is memory, from 0 to its peak.

    Args:
        cost: from `crossframe.cost.step_cost`.
        width: characters per line.

    Raises:
        PlanError: `cost` is not a Cost, or has no events.

    >>> from crossframe.cost import step_cost
    >>> from crossframe.layout import FlatLayout
    >>> from crossframe.mesh import MeshSpec
    >>> from crossframe.params import ParamSpec
    >>> from crossframe.plan import plan_units, step_plan
    >>> units = plan_units([("", FlatLayout((ParamSpec("w", (1000,)),), 4, True))])
    >>> print(plan_text(step_cost(step_plan(units, MeshSpec(4)), units), width=60))  # doctest: +NORMALIZE_WHITESPACE
    time           40.1 µs: 0.01 ns computing, 40.1 µs waiting
                   for communication (100.0 %)
    travels        1 × all-gather, 3.91 KiB
                   1 × reduce-scatter, 3.91 KiB
                   40.1 µs of communication in all
    peak memory    10.7 KiB without activations, at backward of
                   (root), microbatch 0
                   shards 1,000 B, optimizer 1.95 KiB, full
                   parameters 3.91 KiB, full gradients 3.91 KiB
    <BLANKLINE>
                   |forward              |backward
    compute        .............................................
    shard group    ggggggggggggggggggggggrrrrrrrrrrrrrrrrrrrrrrr
    memory         ▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆█▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇
                   0 s                                   40.1 µs
    <BLANKLINE>
    . waiting, g all-gather, r reduce-scatter
    """
    check_cost(cost)
    width = max(40, width)
    body = "\n".join(
        f"{'' if at else head:<{_INDENT}}{part}"
        for head, line in summary_rows(cost)
        for at, part in enumerate(wrap(line, width - _INDENT))
    )
    return f"{body}\n\n{_timeline(cost, width)}"


def summary_rows(cost: Cost) -> Iterator[tuple[str, str]]:
    """The time, the communication and the peak memory of a step, as (head, line); continued lines have an empty head."""
    yield (
        "time",
        f"{seconds_text(cost.seconds)}: {seconds_text(cost.compute_seconds)} computing, "
        f"{seconds_text(cost.exposed_seconds)} waiting for communication ({percent_text(cost.exposed_seconds, cost.seconds)})",
    )
    found = [(kind, entry) for kind, entry in cost.collectives.items() if entry["count"]]
    for kind, entry in found:
        name = WORDS[kind]
        yield (
            "travels" if kind == found[0][0] else "",
            f"{entry['count']:,} {TIMES} {name}, {bytes_text(entry['num_bytes'])}",
        )
    if found:
        yield "", f"{seconds_text(cost.communication_seconds)} of communication in all"
    else:
        yield "travels", "nothing"
    yield "peak memory", f"{bytes_text(cost.peak_bytes)} without activations, at {moment_text(cost)}"
    parts = [(purpose, held) for purpose, held in cost.peak.memory.items() if held]
    yield "", ", ".join(f"{purpose} {bytes_text(held)}" for purpose, held in parts) or "nothing"


def moment_text(cost: Cost) -> str:
    """The moment of the highest memory, as text."""
    event = cost.peak.event
    if event.phase == "step":
        return "the optimizer's step"
    doing = "" if event.kind == "compute" else f" ({WORDS.get(event.kind, event.kind)})"
    return f"{event.phase} of {unit_text(event)}, microbatch {event.microbatch}{doing}"


def _timeline(cost: Cost, width: int) -> str:
    total, num_cells = step_seconds(cost), width - _INDENT
    if not total:
        return "no time passes"
    lines = [("", _phase_line(cost, total, num_cells))]
    seen: set[str] = set()
    for name, bars in lanes(cost).items():
        kinds = sampled(bars, total, num_cells)
        seen.update(kinds)
        lines.append((name, "".join(_LETTERS.get(kind, " ") for kind in kinds)))
    lines.append(("memory", _sparkline(cost, total, num_cells)))
    end = seconds_text(total)
    lines.append(("", "0 s" + end.rjust(num_cells - 3)))
    key = ", ".join(f"{letter} {WORDS[kind]}" for kind, letter in _LETTERS.items() if kind in seen)
    return "\n".join(f"{name:<{_INDENT}}{line}".rstrip() for name, line in lines) + "\n\n" + fill(key, width)


def _phase_line(cost: Cost, total: float, width: int) -> str:
    """A line with the beginnings of forwards and backwards; empty if there are too many."""
    found = phases(cost)
    if 4 * len(found) > width:
        return ""
    line = [" "] * width
    for phase in found:
        at = min(width - 1, int(phase.start / total * width))
        room = int(phase.stop / total * width) - at - 1
        name = phase.name if len(found) <= 2 else f"{phase.name} {phase.microbatch}"
        words = next((words for words in (name, name[:3] + name[len(phase.name) :]) if len(words) <= room), "")
        line[at : at + 1 + len(words)] = f"|{words}"
    return "".join(line)


def _sparkline(cost: Cost, total: float, width: int) -> str:
    """A line with the highest memory in each cell, in eighths of the peak."""
    highest, peak = [0] * width, max(1, cost.peak_bytes)
    moments = [(span.issue_seconds, span) for span in cost.spans]
    stops = [at for at, _ in moments[1:]] + [total]
    for (at, span), until in zip(moments, stops, strict=True):
        first = min(width - 1, int(at / total * width))
        for cell in range(first, max(first + 1, math.ceil(until / total * width))):
            highest[cell] = max(highest[cell], span.memory_bytes)
    eighths = (math.ceil(len(HEIGHTS) * each / peak) for each in highest)
    return "".join(HEIGHTS[max(1, eighth) - 1] for eighth in eighths)


def events_text(cost: Cost) -> str:
    """A table of all events of a step in the order of issue, with unit, size, ranks, times, and memory after each event.

    Raises:
        PlanError: `cost` is not a Cost, or has no events.
    """
    check_cost(cost)
    lines = [["microbatch", "phase", "event", "unit", "ranks", "dtype", "bytes", "start", "duration", "memory"]]
    for span in cost.spans:
        event = span.event
        lines.append(
            [
                str(event.microbatch),
                event.phase,
                WORDS.get(event.kind, event.kind.replace("_", " ")),
                unit_text(event),
                ranks_text(event.group),
                event.dtype,
                bytes_text(event.num_bytes),
                seconds_text(span.start_seconds),
                seconds_text(span.stop_seconds - span.start_seconds),
                bytes_text(span.memory_bytes),
            ]
        )
    return aligned(lines, left=6)
