"""Collectives over a list of arrays, one a rank. Sums are taken in rank order, in the arrays' own dtype (R32)."""

from collections.abc import Sequence

import numpy as np


def all_gather(shards: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Every rank receives the shards of all ranks, one behind the other."""
    return [np.concatenate(shards) for _ in shards]


def all_reduce(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Every rank receives the sum, added up in rank order."""
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return [total.copy() for _ in arrays]


def reduce_scatter(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Rank i receives the i-th of equal parts of the sum, added up in rank order."""
    return np.split(all_reduce(arrays)[0], len(arrays))
