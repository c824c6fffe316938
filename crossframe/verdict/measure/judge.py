"""Judges one quantity by its bound."""

from dataclasses import dataclass

import numpy as np

from crossframe.recording.hashing import same_bits
from crossframe.verdict.measure.metrics import distance, ratio
from crossframe.verdict.measure.quantities import Quantity


@dataclass(frozen=True)
class Judgement:
    """The result for one quantity.

    Attributes:
        equal: whether both sides are bitwise equal, including their dtype.
        difference: the value compared with the bound: norm(a - b) / scale, or with perturbed runs their measure of it; inf if
            only one side is finite.
        beyond: whether the difference exceeds the bound.
        one_sided: whether an element is not finite on one side only, or not finite in a different way.
        both_not_finite: whether an element is NaN, or the same infinity, on both sides.
        whole: norm(a - b) / scale.
        undecided: whether it is beyond its bound, but so little that further perturbed runs may raise the bound above it
            (`crossframe.verdict.perturbed_runs.limits.decisive`).
    """

    quantity: Quantity
    equal: bool
    difference: float
    beyond: bool
    one_sided: bool
    both_not_finite: bool
    whole: float = 0.0
    undecided: bool = False

    @property
    def used(self) -> float:
        """The difference as a share of the bound; more than 1 is outside. inf for any difference if bitwise equality is
        required."""
        return ratio(self.difference, self.quantity.bound or 0.0)


def judge(quantity: Quantity) -> Judgement:
    """Compare both sides of a quantity."""
    if quantity.sketches is not None:
        return _judge_sketches(quantity)
    a, b = quantity.a.reshape(-1), quantity.b.reshape(-1)
    equal = a.dtype == b.dtype and same_bits(a, b)
    a, b = a.astype(np.float64), b.astype(np.float64)
    if equal:
        return Judgement(quantity, True, 0.0, False, False, not np.isfinite(a).all())
    one_sided, shared = not_finite(a, b)
    if one_sided.any():
        return Judgement(quantity, False, np.inf, True, True, bool(shared.any()), np.inf)
    difference = ratio(distance(np.where(shared, 0.0, a), np.where(shared, 0.0, b)), quantity.scale)
    beyond = True if quantity.bound is None else difference > quantity.bound
    return Judgement(quantity, False, difference, beyond, False, bool(shared.any()), difference)


def _judge_sketches(quantity: Quantity) -> Judgement:
    """Compare sketches, which have the number of elements that are not finite but not their positions."""
    assert quantity.sketches is not None
    a, b = quantity.sketches
    if a.equals(b):
        return Judgement(quantity, True, 0.0, False, False, a.num_not_finite > 0)
    if a.num_not_finite != b.num_not_finite:
        return Judgement(quantity, False, np.inf, True, True, False, np.inf)
    difference = ratio(a.distance(b), quantity.scale)
    beyond = True if quantity.bound is None else difference > quantity.bound
    return Judgement(quantity, False, difference, beyond, False, a.num_not_finite > 0, difference)


def not_finite(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Masks of elements that are not finite on one side only or differently, and of those that are not finite in the same way."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    either = ~np.isfinite(a) | ~np.isfinite(b)
    alike = (np.isnan(a) & np.isnan(b)) | (a == b)
    return either & ~alike, either & alike
