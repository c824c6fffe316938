"""What became of the gradients of single ranks on their way into the mean."""

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
    """Ranks whose gradients are not in the sum, and what the others were divided by."""

    ranks: tuple[int, ...]
    divided_by: float
    rest: float
    error: float


@dataclass(frozen=True)
class Low:
    """A sum that was taken too coarsely."""

    dtype: str
    said: str
    rest: float
    error: float


def sum_error(grads: Sequence[np.ndarray], roundoff: float) -> float:
    """By how much the mean of these may be off for rounding alone: W terms, each rounded at most W + 1 times on its way through
    sum and division, to first order, in whatever order they are added (Higham, section 4.2): (W + 1) * u * mean |g|, in norm."""
    magnitudes = np.mean([np.abs(np.asarray(grad, np.float64)).reshape(-1) for grad in grads], axis=0)
    return (len(grads) + 1) * roundoff * norm(magnitudes)


def absent_ranks(sides: Contrast, grads: Sequence[np.ndarray], roundoff: float = 0.0) -> Absent | None:
    """The ranks whose own gradients are missing from a reduced one.

    Args:
        roundoff: of the dtype in which they are reduced, where that is coarser than the one that they are kept in.
        grads: each rank's own gradient, float64 or as recorded, of the shape of the sides. The right side must be their mean.

    The weights of all ranks come from least squares; which are absent is read off them, and the rest is that of the sum over the
    others, divided by the number of all ranks or by that of the others.
    """
    num_ranks = len(grads)
    terms = np.array([np.asarray(grad, np.float64).reshape(-1) for grad in grads])
    error = sum_error(grads, max(sides.roundoff, roundoff))
    mean = terms.mean(axis=0)
    if num_ranks < 2 or norm(sides.right.reshape(-1) - mean) > sides.limit + error:
        return None
    wrong = sides.wrong.reshape(-1)
    weights = np.linalg.lstsq(terms.T, wrong, rcond=None)[0]
    present = np.abs(weights) > np.abs(weights).max() / 2
    if present.all() or not present.any():
        return None
    found = []
    for divisor in {num_ranks, int(present.sum())}:
        rest = norm(wrong - terms[present].sum(axis=0) / divisor)
        error_here = error * num_ranks / divisor
        if accepted(rest, sides.difference, sides.limit * num_ranks / divisor + error_here):
            found.append(Absent(tuple(int(i) for i in np.flatnonzero(~present)), divisor, rest, error_here))
    return min(found, key=lambda absent: absent.rest, default=None)


@dataclass(frozen=True)
class Weighted:
    """Ranks whose gradients count another number of times than once, and not all the same.

    Attributes:
        times: how often each rank's count; 1 is right.
        uncertainty: how far that may be off.
    """

    times: tuple[float, ...]
    uncertainty: float
    rest: float
    error: float

    @property
    def ranks(self) -> list[int]:
        """Those that count otherwise."""
        return [rank for rank, times in enumerate(self.times) if abs(times - 1) > self.uncertainty]


def weighted_ranks(sides: Contrast, grads: Sequence[np.ndarray], roundoff: float = 0.0) -> Weighted | None:
    """How often each rank's gradients count in a reduced one, where some count otherwise than once, and none not at all
    (that is `absent_ranks`).

    Args:
        grads, roundoff: as of `absent_ranks`.

    A weight by least squares is off by at most norm(rest) / (the least singular value of the terms).
    """
    num_ranks = len(grads)
    terms = np.array([np.asarray(grad, np.float64).reshape(-1) for grad in grads])
    error = sum_error(grads, max(sides.roundoff, roundoff))
    tolerance = sides.limit + error
    if num_ranks < 2 or norm(sides.right.reshape(-1) - terms.mean(axis=0)) > tolerance:
        return None
    weights, _, _, singular = np.linalg.lstsq(terms.T, sides.wrong.reshape(-1), rcond=None)
    times = weights * num_ranks
    if not singular.min(initial=np.inf) > 0:
        return None
    rest, largest = norm(sides.wrong.reshape(-1) - weights @ terms), max(1.0, float(np.abs(times).max()))
    uncertainty = tolerance * largest * num_ranks / float(singular.min())
    found = Weighted(tuple(map(float, times)), uncertainty, rest, error * largest)
    fits = accepted(rest, sides.difference, tolerance * largest) and min(map(abs, found.times)) > uncertainty
    # All of them alike is a factor of the whole.
    return found if fits and max(found.times) - min(found.times) > 2 * uncertainty else None


@dataclass(frozen=True)
class Mixed:
    """Ranks whose gradients of another parameter are in the sum, instead of those of this one."""

    ranks: tuple[int, ...]
    rest: float
    error: float


def mixed_ranks(
    sides: Contrast, own: Sequence[np.ndarray], theirs: Sequence[np.ndarray], roundoff: float = 0.0
) -> Mixed | None:
    """The ranks that brought another parameter's gradient into a sum, where each rank brought one or the other (R29).

    Args:
        own, theirs: each rank's gradient of this parameter and of the other one, with as many elements.
        roundoff: as of `absent_ranks`.
    """
    num_ranks = len(own)
    ours = np.array([np.asarray(grad, np.float64).reshape(-1) for grad in own])
    others = np.array([np.asarray(grad, np.float64).reshape(-1) for grad in theirs])
    error = sum_error([*own, *theirs], max(sides.roundoff, roundoff))
    if norm(sides.right.reshape(-1) - ours.mean(axis=0)) > sides.limit + error:
        return None
    weights = np.linalg.lstsq(np.concatenate([ours, others]).T, sides.wrong.reshape(-1), rcond=None)[0]
    swapped = weights[num_ranks:] > 0.5 / num_ranks
    if not swapped.any() or any(is_uninformative(grad, 2 * sides.limit) for grad in others[swapped]):
        return None
    rest = norm(sides.wrong.reshape(-1) - np.where(swapped[:, None], others, ours).mean(axis=0))
    if not accepted(rest, sides.difference, sides.limit + error):
        return None
    return Mixed(tuple(int(i) for i in np.flatnonzero(swapped)), rest, error)


def low_reduction(
    sides: Contrast,
    grads: Sequence[np.ndarray] | None,
    num_ranks: int,
    roundoff: float = 0.0,
    num_replicas: int = 1,
    num_microbatches: int = 1,
) -> Low | None:
    """The dtype in which a sum over ranks was taken, where that was a coarser one than it should have been.

    Args:
        grads: each rank's own gradient; None where these were not recorded.
        roundoff: as of `absent_ranks`.
        num_replicas: groups of ranks, one behind the other, which are summed each for itself first.
        num_microbatches: how many reductions may have been added up since.

    Tried in bfloat16 and in float16: gradients cast before an exact sum, sums of groups cast before they are added, a sum in the
    low dtype from rank to rank (from each rank on, and either way round), and a mean that is cast when it is there. A last resort
    needs no order: every element of the wrong side, or of the sum that it comes from, is a number of the low dtype, of the right
    side most are not, and the sides differ by no more than such a sum may err. Where gradients are recorded the right side must
    be their mean; and a prediction that is that mean too, as of gradients that are numbers of the low dtype anyway, says nothing.
    """
    difference, wrong = sides.difference, sides.wrong
    roundoff = max(sides.roundoff, roundoff)
    error, mean = 0.0, sides.right
    if grads:
        error, mean = sum_error(grads, roundoff), np.mean([np.asarray(grad, np.float64) for grad in grads], axis=0)
        if distance(sides.right, mean.reshape(sides.right.shape)) > sides.limit + error:
            return None
    for low in LOW:
        if unit_roundoff(low) <= roundoff:
            continue
        found = [
            Low(low, said, rest, error)
            for said, predicted in (_coarse_means(grads, low, num_replicas) if grads else ())
            if accepted(rest := sides.rest(predicted), difference, error) and distance(predicted, mean) > error
        ]
        if found:
            return min(found, key=lambda each: each.rest)
        # Without the terms: they are taken to be as large as their mean would be if they all were orthogonal.
        apart = (num_ranks + 1) * unit_roundoff(low) * math.sqrt(num_ranks) * norm(sides.right)
        coarse = 2 * (sum_error(grads, unit_roundoff(low)) if grads else apart)
        for times, what in ((1, "the mean"), (num_ranks, "the sum")):
            fits, others = (on_grid(times * side, low, roundoff) for side in (wrong, sides.right))
            if fits == 1.0 and others <= 0.5 and difference <= coarse:
                return Low(low, f"every element of {what} is a number of {low}", 0.0, error)
            few, of_right = (_of_few(times * side, low, roundoff) for side in (wrong, sides.right))
            if num_microbatches > 1 and few >= 0.9 and of_right <= 0.5 and difference <= coarse:
                said = f"{100 * few:.0f} % of the elements of {what} are sums of {num_microbatches} numbers of {low}"
                return Low(low, said, 0.0, error)
    return None


def _of_few(array: np.ndarray, low: str, roundoff: float) -> float:
    """The share of elements, those other than zero, that twice the significant bits of a low dtype hold, but for two roundings:
    a sum of two numbers of it mostly is one. Of other float32 numbers one in 2^6 is, which its own rounding reaches."""
    values = np.asarray(array, np.float64).reshape(-1)
    values = values[values != 0]
    if not values.size:
        return 0.0
    step = 2.0 ** (np.floor(np.log2(np.abs(values))) + 1) * unit_roundoff(low) ** 2
    return float(np.mean(np.abs(np.round(values / step) * step - values) <= 2 * roundoff * np.abs(values)))


def on_grid(array: np.ndarray, low: str, roundoff: float = 0.0) -> float:
    """The share of the elements, those other than zero, that a low dtype holds, but for two roundings; 0 of none.

    >>> on_grid(np.array([1.0, 0.1, 0.0]), "bfloat16")
    0.5
    """
    array = np.asarray(array, np.float64)
    values = array[array != 0]
    if not values.size:
        return 0.0
    with np.errstate(over="ignore"):
        off = np.abs(values.astype(numpy_dtype(low)).astype(np.float64) - values)
    return float(np.mean(off <= 2 * roundoff * np.abs(values)))


def _coarse_means(grads: Sequence[np.ndarray], low: str, num_replicas: int) -> Iterator[tuple[str, np.ndarray]]:
    dtype, num_ranks = numpy_dtype(low), len(grads)
    factors = divide_factors(num_ranks)
    exact = [np.asarray(grad, np.float64) for grad in grads]
    with np.errstate(over="ignore", invalid="ignore"):
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
    """Round a ring, from each rank on, either way; of many ranks from the first one on."""
    for first in range(num_ranks if num_ranks <= MANY else 1):
        around = tuple((first + i) % num_ranks for i in range(num_ranks))
        yield around
        yield around[::-1]
