"""Time of steps in alternation: every contestant takes a step, in an order drawn anew, round after round.

Machines are shared and their speed drifts; what is timed within one round has nearly the same conditions. So each comparison is
the median, over the rounds, of a ratio of two times of the same round.
"""

import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

WARM_UP = 3
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
# Seconds of each contestant, one a round.
Times = Mapping[str, Sequence[float]]


def alternate(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    ready: Callable[[], object] = lambda: None,
    warm_up: int = WARM_UP,
) -> dict[str, dict[str, list[float]]]:
    """What each step took, by each of the CLOCKS, in each round: {clock: {name: seconds}}.

    The first `warm_up` rounds are not counted. The order is drawn from the round's number, so that all ranks draw the same.
    Garbage is collected between rounds and not within them.

    Args:
        ready: called before each step, not timed: where ranks wait for one another.
    """
    times: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in steps} for clock in CLOCKS}
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for turn in range(warm_up + rounds):
            for name in random.Random(turn).sample(list(steps), len(steps)):
                ready()
                start = [now() for now in CLOCKS.values()]
                steps[name]()
                for (clock, now), then in zip(CLOCKS.items(), start, strict=True):
                    times[clock][name].append(now() - then)
            gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
    return {clock: {name: seconds[warm_up:] for name, seconds in by_name.items()} for clock, by_name in times.items()}


def slowest(by_rank: Sequence[Times]) -> dict[str, list[float]]:
    """The time of the rank that took longest, in each round.

    >>> slowest([{"a": [1.0, 5.0]}, {"a": [2.0, 4.0]}])
    {'a': [2.0, 5.0]}
    """
    return {
        name: [max(taken) for taken in zip(*(times[name] for times in by_rank), strict=True)] for name in by_rank[0]
    }


def fastest(times: Times, names: Sequence[str]) -> str:
    """The one with the lowest median."""
    return min(names, key=lambda name: median(times[name]))


def ratios(times: Times, name: str, other: str, bare: str | None = None) -> list[float]:
    """Time of `name` to that of `other`, round by round; with `bare`, after subtracting the time of that.

    >>> ratios({"a": [3.0, 4.0], "b": [6.0, 2.0], "c": [1.0, 1.0]}, "a", "b")
    [0.5, 2.0]
    >>> ratios({"a": [3.0, 4.0], "b": [5.0, 2.0], "c": [1.0, 1.0]}, "a", "b", bare="c")
    [0.5, 3.0]
    """
    base = times[bare] if bare else [0.0] * len(times[name])
    return [(a - c) / (b - c) for a, b, c in zip(times[name], times[other], base, strict=True)]
