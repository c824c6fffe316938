"""Groups runs by agreement."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
V = TypeVar("V")


@dataclass(frozen=True)
class Grouping(Generic[V]):
    """Groups of runs, each with its first run as its representative. Runs are indices.

    Attributes:
        groups: the runs of each group, in order.
        compared: the verdicts on pairs of runs (representative or earlier run, later run): each run was compared with each
            representative, and no others.
        ambiguous: runs that agree with representatives of several groups: (run, representatives). Within rounding, agreement
            is not transitive. They are in the group that is first in order.
    """

    groups: tuple[tuple[int, ...], ...]
    compared: dict[tuple[int, int], V]
    ambiguous: tuple[tuple[int, tuple[int, ...]], ...]

    def between(self) -> list[tuple[int, int]]:
        """The pairs of representatives."""
        firsts = [group[0] for group in self.groups]
        return [(a, b) for i, a in enumerate(firsts) for b in firsts[i + 1 :]]


def group_by_agreement(runs: Sequence[T], compare: Callable[[T, T], V], agrees: Callable[[V], bool]) -> Grouping[V]:
    """Put each run into the first group whose representative it agrees with, or into a new one.

    >>> found = group_by_agreement([0.0, 0.6, 1.2, 5.0], lambda x, y: abs(x - y), lambda difference: difference < 1)
    >>> found.groups, found.ambiguous
    (((0, 1), (2,), (3,)), ((1, (0, 2)),))
    """
    groups: list[list[int]] = []
    compared: dict[tuple[int, int], V] = {}

    def agree(a: int, b: int) -> bool:
        pair = (min(a, b), max(a, b))
        if pair not in compared:
            compared[pair] = compare(runs[pair[0]], runs[pair[1]])
        return agrees(compared[pair])

    for run in range(len(runs)):
        matches = [group for group in groups if agree(group[0], run)]
        if matches:
            matches[0].append(run)
        else:
            groups.append([run])
    firsts = [group[0] for group in groups]
    ambiguous = []
    for run in sorted(each for group in groups for each in group[1:]):
        near = tuple(first for first in firsts if agree(first, run))
        if len(near) > 1:
            ambiguous.append((run, near))
    return Grouping(tuple(map(tuple, groups)), compared, tuple(ambiguous))
