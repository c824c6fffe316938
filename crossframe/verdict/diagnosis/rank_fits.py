"""Fits the contributions of ranks to a reduced gradient: absent, reweighted, mixed up, or summed in a coarser dtype."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from crossframe.dtypes import numpy_dtype, unit_roundoff
from crossframe.reduction import divide_factors
from crossframe.verdict.diagnosis.fit import Contrast, accepted, is_uninformative
from crossframe.verdict.measure.metrics import distance, norm

LOW = ("bfloat16", "float16")
MANY = 8


@dataclass(frozen=True)
class Absent:
    """Ranks whose gradients are missing from the sum, and the divisor of the others."""

    ranks: tuple[int, ...]
    divided_by: float
    residual: float
    error: float


@dataclass(frozen=True)
class Low:
    """A sum in a coarser dtype."""

    dtype: str
    text: str
    residual: float
    error: float


def sum_error(grads: Sequence[np.ndarray], roundoff: float) -> float:
    """The bound on the rounding of the mean of W gradients, in norm: (W + 1) * u * mean |g|.

    Each of the W terms is rounded at most W + 1 times in sum and division, to first order, in any order (Higham, section 4.2).
    """
    magnitudes = np.mean([np.abs(np.asarray(grad, np.float64)).reshape(-1) for grad in grads], axis=0)
    return (len(grads) + 1) * roundoff * norm(magnitudes)


def _terms(sides: Contrast, grads: Sequence[np.ndarray], roundoff: float) -> tuple[np.ndarray, float] | None:
    """(gradients as rows, bound on the rounding of their mean); None if the right side is not their mean."""
    terms = np.array([np.asarray(grad, np.float64).reshape(-1) for grad in grads])
    error = sum_error(grads, max(sides.roundoff, roundoff))
    return (terms, error) if distance(sides.right.reshape(-1), terms.mean(axis=0)) <= sides.limit + error else None


def absent_ranks(sides: Contrast, grads: Sequence[np.ndarray], roundoff: float = 0.0) -> Absent | None:
    """The ranks whose local gradients are missing from a reduced gradient.

    The weights of all ranks come from least squares. The residual is that of the sum over present ranks, divided by the number of
    all ranks or of present ranks.

    Args:
        grads: the local gradient of each rank, with the shape of the sides. The right side must be their mean.
        roundoff: unit roundoff of the reduce dtype, if coarser than that of the sides.
    """
    if (known := _terms(sides, grads, roundoff)) is None:
        return None
    (terms, error), num_ranks = known, len(grads)
    wrong = sides.wrong.reshape(-1)
    weights = np.linalg.lstsq(terms.T, wrong, rcond=None)[0]
    present = np.abs(weights) > np.abs(weights).max() / 2
    if present.all() or not present.any():
        return None
    found = []
    for divisor in {num_ranks, int(present.sum())}:
        residual = norm(wrong - terms[present].sum(axis=0) / divisor)
        error_here = error * num_ranks / divisor
        if accepted(residual, sides.difference, sides.limit * num_ranks / divisor + error_here):
            found.append(Absent(tuple(int(i) for i in np.flatnonzero(~present)), divisor, residual, error_here))
    return min(found, key=lambda absent: absent.residual, default=None)


@dataclass(frozen=True)
class Weighted:
    """Unequal weights of ranks in a mean.

    Attributes:
        times: the weight of each rank relative to the correct one.
        uncertainty: the bound on their error.
    """

    times: tuple[float, ...]
    uncertainty: float
    residual: float
    error: float

    @property
    def ranks(self) -> list[int]:
        return [rank for rank, times in enumerate(self.times) if abs(times - 1) > self.uncertainty]


def weighted_ranks(sides: Contrast, grads: Sequence[np.ndarray], roundoff: float = 0.0) -> Weighted | None:
    """The weights of ranks in a reduced gradient, if they are unequal and none is zero (`absent_ranks`).

    A least-squares weight has an error of at most norm(residual) / (the smallest singular value of the terms).

    Args:
        grads, roundoff: as for `absent_ranks`.
    """
    if (known := _terms(sides, grads, roundoff)) is None:
        return None
    (terms, error), num_ranks = known, len(grads)
    tolerance = sides.limit + error
    weights, _, _, singular = np.linalg.lstsq(terms.T, sides.wrong.reshape(-1), rcond=None)
    if not singular.min() > 0:
        return None
    times = weights * num_ranks
    residual, largest = norm(sides.wrong.reshape(-1) - weights @ terms), max(1.0, float(np.abs(times).max()))
    uncertainty = tolerance * largest * num_ranks / float(singular.min())
    found = Weighted(tuple(map(float, times)), uncertainty, residual, error * largest)
    fits = accepted(residual, sides.difference, tolerance * largest) and min(map(abs, found.times)) > uncertainty
    # Equal weights are a factor of the whole gradient.
    return found if fits and max(found.times) - min(found.times) > 2 * uncertainty else None


@dataclass(frozen=True)
class Mixed:
    """Ranks that contributed the gradient of another parameter."""

    ranks: tuple[int, ...]
    residual: float
    error: float


def mixed_ranks(
    sides: Contrast, own: Sequence[np.ndarray], theirs: Sequence[np.ndarray], roundoff: float = 0.0
) -> Mixed | None:
    """The ranks that contributed another parameter's gradient to a sum, if every rank contributed one or the other (R29).

    Args:
        own, theirs: the gradients of this parameter and of the other one on each rank, with the same number of elements.
        roundoff: as for `absent_ranks`.
    """
    if (known := _terms(sides, own, roundoff)) is None:
        return None
    ours, others = known[0], np.array([np.asarray(grad, np.float64).reshape(-1) for grad in theirs])
    error = sum_error([*own, *theirs], max(sides.roundoff, roundoff))
    weights = np.linalg.lstsq(np.concatenate([ours, others]).T, sides.wrong.reshape(-1), rcond=None)[0]
    swapped = weights[len(own) :] > 0.5 / len(own)
    if not swapped.any() or any(is_uninformative(grad, 2 * sides.limit) for grad in others[swapped]):
        return None
    residual = norm(sides.wrong.reshape(-1) - np.where(swapped[:, None], others, ours).mean(axis=0))
    if not accepted(residual, sides.difference, sides.limit + error):
        return None
    return Mixed(tuple(int(i) for i in np.flatnonzero(swapped)), residual, error)


def low_reduction(
    sides: Contrast,
    grads: Sequence[np.ndarray] | None,
    num_ranks: int,
    roundoff: float = 0.0,
    num_replicas: int = 1,
    num_microbatches: int = 1,
) -> Low | None:
    """The coarser dtype in which a sum over ranks was computed.

    For bfloat16 and float16, these are tried: gradients cast before an exact sum, sums of groups cast before they are added, a
    sequential sum in the low dtype (from each rank, in both directions), and a cast of the mean. Otherwise the order is unknown,
    and it is accepted that all elements of the wrong side, or of its sum, are values of the low dtype, while most of the right
    side's are not, if the sides differ by at most the error of such a sum. If gradients are recorded, the right side must be
    their mean, and a prediction that equals this mean (as for gradients that are values of the low dtype anyway) is ignored.

    Args:
        grads: the local gradient of each rank; None if not recorded.
        roundoff: as for `absent_ranks`.
        num_replicas: number of consecutive groups of ranks that are summed separately first.
        num_microbatches: number of reductions that may have been accumulated.
    """
    difference, wrong = sides.difference, sides.wrong
    roundoff = max(sides.roundoff, roundoff)
    error, mean = 0.0, sides.right
    if grads:
        if (known := _terms(sides, grads, roundoff)) is None:
            return None
        terms, error = known
        mean = terms.mean(axis=0).reshape(sides.right.shape)
    for low in LOW:
        if unit_roundoff(low) <= roundoff:
            continue
        found = [
            Low(low, text, residual, error)
            for text, predicted in (_coarse_means(grads, low, num_replicas) if grads else ())
            if accepted(residual := sides.residual(predicted), difference, error) and distance(predicted, mean) > error
        ]
        if found:
            return min(found, key=lambda each: each.residual)
        # Without the terms, their magnitude is estimated by assuming that they are orthogonal.
        apart = (num_ranks + 1) * unit_roundoff(low) * math.sqrt(num_ranks) * norm(sides.right)
        coarse = 2 * (sum_error(grads, unit_roundoff(low)) if grads else apart)
        for times, what in ((1, "the mean"), (num_ranks, "the sum")):
            fits, others = (on_grid(times * side, low, roundoff) for side in (wrong, sides.right))
            if fits == 1.0 and others <= 0.5 and difference <= coarse:
                return Low(low, f"all elements of {what} are {low} values", 0.0, error)
            few, of_right = (_of_few(times * side, low, roundoff) for side in (wrong, sides.right))
            if num_microbatches > 1 and few >= 0.9 and of_right <= 0.5 and difference <= coarse:
                text = f"{100 * few:.0f} % of the elements of {what} are sums of {num_microbatches} {low} values"
                return Low(low, text, 0.0, error)
    return None


def _of_few(array: np.ndarray, low: str, roundoff: float) -> float:
    """The share of nonzero elements that fit into twice the significant bits of a low dtype, up to two roundings.

    Most sums of two values of the low dtype do; of other float32 values, about one in 2^6.
    """
    values = array[array != 0]
    if not values.size:
        return 0.0
    step = 2.0 ** (np.floor(np.log2(np.abs(values))) + 1) * unit_roundoff(low) ** 2
    return float(np.mean(np.abs(np.round(values / step) * step - values) <= 2 * roundoff * np.abs(values)))


def on_grid(array: np.ndarray, low: str, roundoff: float = 0.0) -> float:
    """The share of nonzero elements that are values of a low dtype, up to two roundings; 0 without nonzero elements.

    >>> on_grid(np.array([1.0, 0.1, 0.0]), "bfloat16")
    0.5
    """
    values = array[array != 0]
    if not values.size:
        return 0.0
    off = np.abs(values.astype(numpy_dtype(low)).astype(np.float64) - values)
    return float(np.mean(off <= 2 * roundoff * np.abs(values)))


def _coarse_means(grads: Sequence[np.ndarray], low: str, num_replicas: int) -> Iterator[tuple[str, np.ndarray]]:
    dtype, num_ranks = numpy_dtype(low), len(grads)
    factors = divide_factors(num_ranks)
    exact = [np.asarray(grad, np.float64) for grad in grads]
    for before, after in {(1.0, float(num_ranks)), (factors.before, factors.after), (float(num_ranks), 1.0)}:
        cast = [(grad / before).astype(dtype) for grad in exact]
        yield (
            f"the gradients were cast to {low} before they were summed",
            np.sum([c.astype(np.float64) for c in cast], axis=0) / after,
        )
        if num_replicas > 1:
            groups = np.array(exact).reshape(num_replicas, -1, *exact[0].shape) / before
            parts = groups.sum(axis=1).astype(dtype).astype(np.float64)
            yield f"the sums of replicas were cast to {low} before they were added", parts.sum(axis=0) / after
            mean = (parts.sum(axis=0) / after).astype(dtype).astype(np.float64)
            yield f"the sums of replicas were cast to {low} and added in it", mean
        for order in _orders(num_ranks):
            total = cast[order[0]]
            for i in order[1:]:
                total = (total.astype(np.float64) + cast[i].astype(np.float64)).astype(dtype)
            mean = total.astype(np.float64) / after
            yield f"the gradients were summed in {low}", mean
            yield f"the gradients were summed in {low}", mean.astype(dtype).astype(np.float64)
    mean = np.mean(exact, axis=0)
    yield f"the mean was cast to {low}", mean.astype(dtype).astype(np.float64)


def _orders(num_ranks: int) -> Iterator[tuple[int, ...]]:
    """Ring orders from each rank in both directions; with many ranks only from the first one."""
    for first in range(num_ranks if num_ranks <= MANY else 1):
        around = tuple((first + i) % num_ranks for i in range(num_ranks))
        yield around
        yield around[::-1]
