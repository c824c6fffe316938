"""Signatures of the slices of an array, which do not depend on the order of elements within a slice.

The signature of a set of elements is the sum of a hash of each one's bits, modulo 2^64. So two slices with the same elements have
the same signature whatever transposition or reshape lies between them, and one pass over an array gives the signatures of the
slices along every axis. Two different slices have the same signature with probability 2^-64.
"""

import itertools
import math
from collections.abc import Iterator

import numpy as np


def axis_signatures(hashes: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """The signatures of the slices along some axes, flattened: the first axis varies slowest. Without axes, that of the array."""
    others = tuple(axis for axis in range(hashes.ndim) if axis not in axes)
    return hashes.sum(axis=others, dtype=np.uint64).reshape(-1)


def axis_sets(shape: tuple[int, ...], size: int) -> Iterator[tuple[int, ...]]:
    """The sets of axes that have `size` slices together. Axes of size 1 are in none."""
    wide = [axis for axis, extent in enumerate(shape) if extent > 1]
    for count in range(1, len(wide) + 1):
        for axes in itertools.combinations(wide, count):
            if math.prod(shape[axis] for axis in axes) == size:
                yield axes
