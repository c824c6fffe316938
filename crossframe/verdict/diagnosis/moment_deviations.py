"""Explains an optimizer moment that deviates from its running average.

As in `update_deviations`, the right side's moment follows the rule from its own values, and the wrong side's follows it with one
change.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from crossframe.verdict.diagnosis.fit import Claim, Fit, accepted, factor_between, factor_roundoff
from crossframe.verdict.diagnosis.optimizer_rules import Average
from crossframe.verdict.diagnosis.update_deviations import FEW, TINY
from crossframe.verdict.measure.metrics import distance, norm

Offer = Callable[[str, str, float, float, Claim], None]
"""Takes (signature, description, residual, error, claim)."""


@dataclass(frozen=True)
class Moment:
    """One side's update of a moment, in float64.

    Attributes:
        old, new: the moment before and after this step.
        gradient: the expected input: the clipped gradient with its decay, squared for a second moment.
        before: the parameter before the step.
        roundoff: unit roundoff of the moment's dtype.
    """

    old: np.ndarray
    new: np.ndarray
    gradient: np.ndarray
    before: np.ndarray
    roundoff: float

    def residual(self, average: Average, *, old: np.ndarray | None = None, gradient: np.ndarray | None = None) -> float:
        """The norm of the part that a rule does not explain, optionally with another old moment or gradient."""
        start, goes_in = self.old if old is None else old, self.gradient if gradient is None else gradient
        return distance(self.new, average.new(start, goes_in))

    def error(self, average: Average, *, old: np.ndarray | None = None, gradient: np.ndarray | None = None) -> float:
        start, goes_in = self.old if old is None else old, self.gradient if gradient is None else gradient
        return average.error(start, goes_in, self.roundoff)

    def follows(self, average: Average) -> bool:
        """Whether the residual is within `FEW` times the first-order bound."""
        return self.residual(average) <= FEW * self.error(average)

    def went_in(self, average: Average) -> np.ndarray:
        """The gradient that explains the new moment."""
        return (self.new - average.keep * self.old) / average.gain


@dataclass(frozen=True)
class Other:
    """A value that may have been used instead of the old moment."""

    signature: str
    text: str
    value: np.ndarray


def moment_deviations(
    right: Moment,
    wrong: Moment,
    stated: Average,
    others: Iterable[Other],
    difference: float,
    *,
    decay: float = 0.0,
    squared: bool = False,
) -> list[Fit]:
    """The changes to a moment's rule that explain the wrong side's moment, if the unchanged rule explains the right side's only.

    Args:
        others: values that may have been used instead of the old moment.
        difference: norm(right - wrong).
        decay: the factor of the parameter in `gradient`.
        squared: whether it is a second moment.
    """
    if wrong.residual(stated) <= wrong.error(stated):
        return []  # the wrong side follows the rule
    if right.residual(stated) > right.error(stated):
        # Something unrecorded, such as a gradient scaler or clipping, may have scaled gradients on both sides before the decay.
        kept = [0.0 if squared else decay * side.before for side in (right, wrong)]
        scale = factor_between(right.gradient - kept[0], right.went_in(stated) - kept[0])
        right, wrong = (
            replace(side, gradient=scale * (side.gradient - own) + own)
            for side, own in zip((right, wrong), kept, strict=True)
        )
        if scale <= 0 or right.residual(stated) > right.error(stated):
            return []
    fits: list[Fit] = []

    def offer(signature: str, text: str, residual: float, error: float, claim: Claim) -> None:
        if accepted(residual, difference, error):
            fits.append(Fit(signature, text, residual, error, claim))

    for other in others:
        residual, error = wrong.residual(stated, old=other.value), wrong.error(stated, old=other.value)
        offer(other.signature, other.text, residual, error, Claim(other.text))
    error = wrong.error(stated)
    _offer_factor(offer, wrong, stated, error, squared)
    if not squared:
        _offer_decay(offer, wrong, stated, error, decay)
    _offer_keep(offer, wrong, stated)
    return fits


def _offer_factor(offer: Offer, wrong: Moment, stated: Average, error: float, squared: bool) -> None:
    factor = factor_between(wrong.gradient, wrong.went_in(stated))
    size = norm(wrong.gradient)
    if not size:
        return
    predicted = factor * wrong.gradient
    text = f"the input of the moment is {factor:.6g} times the {'square of the ' if squared else ''}gradient"
    claim = Claim("gradient", factor, error / stated.gain / size)
    offer(
        "constant_factor",
        text,
        wrong.residual(stated, gradient=predicted),
        wrong.error(stated, gradient=predicted) + stated.gain * factor_roundoff(predicted),
        claim,
    )


def _offer_decay(offer: Offer, wrong: Moment, stated: Average, error: float, decay: float) -> None:
    size = norm(wrong.before)
    if not size:
        return
    more = factor_between(wrong.before, wrong.went_in(stated) - wrong.gradient)
    uncertainty = error / stated.gain / size
    total = 0.0 if abs(more + decay) <= uncertainty else more + decay
    added = f"includes {total:.4g} times the parameter" if total else "does not include the parameter"
    text = f"the gradient in the moment {added}, while {decay:.4g} times is stated"
    predicted = wrong.gradient + more * wrong.before
    error = wrong.error(stated, gradient=predicted) + stated.gain * factor_roundoff(more * wrong.before)
    offer("weight_decay", text, wrong.residual(stated, gradient=predicted), error, Claim("decay", total, uncertainty))


def _offer_keep(offer: Offer, wrong: Moment, stated: Average) -> None:
    """Another beta: new - g = beta (old - g), or new - g = beta old for a buffer with a gain of 1."""
    behind = wrong.gradient if stated.gain != 1.0 else np.zeros_like(wrong.gradient)
    gap = wrong.old - behind
    if not norm(wrong.old):
        return  # only the gradient can differ then
    keep = factor_between(gap, wrong.new - wrong.gradient)
    changed = Average(keep, 1 - keep if stated.gain != 1.0 else 1.0)
    error = wrong.error(changed) + factor_roundoff(keep * gap)
    text = f"its decay rate is {keep:.6g}, while {stated.keep:.6g} is stated"
    offer("constant_factor", text, wrong.residual(changed), error, Claim("keep", keep, error / max(norm(gap), TINY)))
