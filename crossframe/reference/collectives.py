"""Collectives over a list of arrays, one for each rank. Sums are computed in rank order and in the dtype of the arrays (R32)."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

Arrays = Sequence[np.ndarray]


def all_gather(shards: Arrays) -> list[np.ndarray]:
    """Every rank receives the shards of all ranks, concatenated."""
    return [np.concatenate(shards) for _ in shards]


def all_reduce(arrays: Arrays) -> list[np.ndarray]:
    """Every rank receives the sum, computed in rank order."""
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return [total.copy() for _ in arrays]


def reduce_scatter(arrays: Arrays) -> list[np.ndarray]:
    """Rank i receives the i-th of equal parts of the sum, computed in rank order."""
    return np.split(all_reduce(arrays)[0], len(arrays))


def over_groups(
    collective: Callable[[Arrays], list[np.ndarray]], arrays: Arrays, groups: Iterable[Sequence[int]]
) -> list[np.ndarray]:
    """Run a collective in each of several groups, which together have all ranks.

    >>> over_groups(all_reduce, [np.array([1]), np.array([2]), np.array([3]), np.array([4])], [(0, 2), (1, 3)])
    [array([4]), array([6]), array([4]), array([6])]
    """
    results = dict.fromkeys(range(len(arrays)), np.empty(0))
    for group in groups:
        results |= zip(group, collective([arrays[rank] for rank in group]), strict=True)
    return list(results.values())
