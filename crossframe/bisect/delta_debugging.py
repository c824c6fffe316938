"""Delta debugging: minimal sets of changes that cause a failure.

A. Zeller and R. Hildebrandt, Simplifying and isolating failure-inducing input, IEEE Transactions on Software Engineering 28
(2002), algorithm ddmin.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from itertools import pairwise

Changes = tuple[int, ...]
"""Indices of changes, in increasing order."""


class Outcome(Enum):
    """The outcome of a run with some of the changes.

    UNRESOLVED: the run failed, or its verdict is undecided.
    """

    DIVERGES = "diverges"
    AGREES = "agrees"
    UNRESOLVED = "unresolved"


def find_causes(num: int, test: Callable[[Changes], Outcome]) -> tuple[Changes, ...]:
    """Minimal sets of changes that make a run diverge, each found without the changes of those before it.

    A set is 1-minimal: without any one of its changes, the run does not diverge. A set of two changes is an interaction.

    Args:
        num: number of changes. With all of them, the run is known to diverge.
        test: runs with these changes and without the others. It is not called twice with the same ones.

    >>> find_causes(4, lambda changes: Outcome.DIVERGES if 2 in changes or {0, 3} <= {*changes} else Outcome.AGREES)
    ((2,), (0, 3))
    """
    every = tuple(range(num))
    known = {every: Outcome.DIVERGES, (): Outcome.AGREES}

    def diverges(changes: Changes) -> bool:
        if changes not in known:
            known[changes] = test(changes)
        return known[changes] is Outcome.DIVERGES

    found, rest = [], every
    while rest and diverges(rest):
        cause = _minimal(rest, diverges)
        found.append(cause)
        rest = tuple(each for each in rest if each not in cause)
    return tuple(found)


def _minimal(changes: Changes, diverges: Callable[[Changes], bool]) -> Changes:
    num_parts = 2
    while len(changes) > 1:
        parts = _parts(changes, num_parts)
        complements = [tuple(each for each in changes if each not in part) for part in parts]
        if (smaller := next((part for part in parts if diverges(part)), None)) is not None:
            changes, num_parts = smaller, 2
        elif (smaller := next((each for each in complements if diverges(each)), None)) is not None:
            changes, num_parts = smaller, max(num_parts - 1, 2)
        elif num_parts == len(changes):
            break
        else:
            num_parts = min(2 * num_parts, len(changes))
    return changes


def _parts(changes: Sequence[int], num: int) -> list[Changes]:
    """Consecutive parts of almost equal size.

    >>> _parts((0, 1, 2, 3, 4), 2)
    [(0, 1), (2, 3, 4)]
    """
    at = [len(changes) * i // num for i in range(num + 1)]
    return [tuple(changes[start:stop]) for start, stop in pairwise(at)]
