"""One quantity judged."""

from dataclasses import dataclass

import numpy as np

from crossframe.verdict.measure.metrics import distance, ratio
from crossframe.verdict.measure.quantities import Quantity


@dataclass(frozen=True)
class Judgement:
    """What became of one quantity.

    Attributes:
        equal: every bit, dtype included.
        difference: what is held against the bound: norm(a - b) / scale, or with perturbed runs what they measure of it; inf
            where only one side is finite.
        beyond: whether it is outside its bound.
        one_sided: whether an element is not finite on one side only (or not finite in another way).
        both_not_finite: whether an element is NaN, or the same infinity, on both sides.
        whole: norm(a - b) / scale, whatever is held against the bound.
    """

    quantity: Quantity
    equal: bool
    difference: float
    beyond: bool
    one_sided: bool
    both_not_finite: bool
    whole: float = 0.0

    @property
    def used(self) -> float:
        """How much of its bound the difference uses up; more than 1 is outside. Data movement may use nothing."""
        return ratio(self.difference, self.quantity.bound or 0.0)


def judge(quantity: Quantity) -> Judgement:
    """Hold both sides of a quantity against its bound."""
    if quantity.sketches is not None:
        return _judge_sketches(quantity)
    a, b = quantity.a.reshape(-1), quantity.b.reshape(-1)
    equal = a.dtype == b.dtype and a.tobytes() == b.tobytes()
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
    """The same by what is left of the elements. Which of them are not finite nobody knows, only how many."""
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
    """Elements that are not finite on one side only or otherwise than on the other, and those that are so alike."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    either = ~np.isfinite(a) | ~np.isfinite(b)
    alike = (np.isnan(a) & np.isnan(b)) | (a == b)
    return either & ~alike, either & alike
