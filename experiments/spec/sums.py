"""R32: the reference sums in rank order, bit for bit; which orders give the same, and how far any is from the exact sum."""

import math
from collections.abc import Sequence
from itertools import permutations, product

import numpy as np

from crossframe.dtypes import numpy_dtype
from crossframe.reference import all_reduce, reduce_scatter
from experiments.spec.checks import SEED, Scope
from experiments.spec.tally import Tallies

NUMEL = 24
ROUNDED = "the exact sum"
IN_ORDER = "one addition behind the other"
# Unit roundoff: half of the distance from 1 to the next number.
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def sums_in_order(tallies: Tallies, scope: Scope) -> None:
    """Up to 8 ranks, every dtype, many draws: each element that a rank receives."""
    cases = list(product(range(1, 9), ROUNDOFF, range(100)))
    for num_ranks, dtype, seed in scope.take(cases, num_quick=120):
        case = f"{num_ranks} ranks, {dtype}, seed {seed}"
        arrays = _draw(num_ranks, dtype, seed)
        expected = _folded(arrays)
        for rank, found in enumerate(all_reduce(arrays)):
            tallies["R32"].compare(found.tobytes(), expected.tobytes(), (case, f"rank {rank}"), IN_ORDER)
        if NUMEL % num_ranks == 0:
            joined = np.concatenate(reduce_scatter(arrays))
            tallies["R32"].compare(joined.tobytes(), expected.tobytes(), (case, "reduce_scatter"), IN_ORDER)
        _compare_bound(tallies, arrays, expected, case)


def _compare_bound(tallies: Tallies, arrays: Sequence[np.ndarray], found: np.ndarray, case: str) -> None:
    """No order is further from the exact sum than (n - 1) u / (1 - (n - 1) u) times the sum of sizes.

    Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, section 4.2.
    """
    n, u = len(arrays), ROUNDOFF[str(arrays[0].dtype)]
    columns = np.stack([array.astype(np.float64) for array in arrays], axis=1)
    bound = (n - 1) * u / (1 - (n - 1) * u)
    near = [
        abs(float(total) - math.fsum(column)) <= bound * math.fsum(map(abs, column)) * (1 + 2.0**-50)
        for total, column in zip(found, columns, strict=True)
    ]
    tallies["R32"].compare(near, [True] * len(near), case, ROUNDED)


def any_order(tallies: Tallies, scope: Scope) -> None:
    """Every order of up to 5 ranks. Small integers sum to the same bits in all of them, and so does anything on two ranks; with
    three ranks or more other numbers do not."""
    cases = list(product(range(1, 6), ROUNDOFF, range(20)))
    for num_ranks, dtype, seed in scope.take(cases, num_quick=40):
        case = f"{num_ranks} ranks, {dtype}, seed {seed}"
        rng = np.random.default_rng([SEED, seed])
        whole = [rng.integers(-8, 9, NUMEL).astype(numpy_dtype(dtype)) for _ in range(num_ranks)]
        tallies["R32"].compare(len(_results(whole)), 1, (case, "integers"), "the number of different sums")
        differ = len(_results(_draw(num_ranks, dtype, seed))) > 1
        tallies["R32"].compare(differ, num_ranks > 2, (case, "orders differ"), "the rule")


def _results(arrays: Sequence[np.ndarray]) -> set[bytes]:
    return {all_reduce([arrays[i] for i in order])[0].tobytes() for order in permutations(range(len(arrays)))}


def _draw(num_ranks: int, dtype: str, seed: int) -> list[np.ndarray]:
    """Numbers of several orders of magnitude and of both signs, so that the order of their sum matters."""
    rng = np.random.default_rng([SEED, num_ranks, seed])
    values = rng.standard_normal((num_ranks, NUMEL)) * 10.0 ** rng.integers(-2, 3, (num_ranks, NUMEL))
    return list(values.astype(numpy_dtype(dtype)))


def _folded(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Each element by itself: numbers added up in the order of ranks, each result rounded to the dtype."""
    kind = arrays[0].dtype.type
    total = []
    for column in zip(*arrays, strict=True):
        running = column[0]
        for value in column[1:]:
            running = kind(float(running) + float(value)) if kind is not np.float64 else running + value
        total.append(running)
    return np.array(total, arrays[0].dtype)
