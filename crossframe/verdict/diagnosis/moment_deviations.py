"""How a moment of an optimizer departs from the running average that it should be.

As with updates (`update_deviations`), one side's moment is explained by the rule, from that side's own values; the other's by the
rule with one thing changed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from crossframe.verdict.diagnosis.fit import Claim, Fit, accepted, factor_between
from crossframe.verdict.diagnosis.optimizer_rules import Average
from crossframe.verdict.diagnosis.update_deviations import FEW, TINY
from crossframe.verdict.measure.metrics import distance, norm

Offer = Callable[[str, str, float, float, Claim], None]
"""Takes a signature, how it is said, its rest, its error and its claim."""


@dataclass(frozen=True)
class Moment:
    """What one side's optimizer made of a moment, in float64.

    Attributes:
        old, new: the moment before and behind this step.
        gradient: what should have gone in: clipped, with the decay that belongs to it, squared of a second moment.
        before: the parameter before the step.
        roundoff: of the dtype of the moment.
    """

    old: np.ndarray
    new: np.ndarray
    gradient: np.ndarray
    before: np.ndarray
    roundoff: float

    def rest(self, average: Average, *, old: np.ndarray | None = None, gradient: np.ndarray | None = None) -> float:
        """What a rule leaves unexplained; with another moment before it, or another gradient, where given."""
        start, goes_in = self.old if old is None else old, self.gradient if gradient is None else gradient
        return distance(self.new, average.new(start, goes_in))

    def error(self, average: Average, *, old: np.ndarray | None = None, gradient: np.ndarray | None = None) -> float:
        """What rounding may leave of that."""
        start, goes_in = self.old if old is None else old, self.gradient if gradient is None else gradient
        return average.error(start, goes_in, self.roundoff)

    def follows(self, average: Average) -> bool:
        """Whether the rule explains it, within a few times the bound, which is of first order."""
        return self.rest(average) <= FEW * self.error(average)

    def went_in(self, average: Average) -> np.ndarray:
        """The gradient that did."""
        return (self.new - average.keep * self.old) / average.gain


@dataclass(frozen=True)
class Other:
    """Something that may have stood in the place of the moment before the step."""

    signature: str
    said: str
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
    """The changes to a moment's rule that explain the wrong side's, where the rule itself explains the right side's and not this.

    Args:
        difference: norm of what is to be explained.
        decay: what `gradient` holds of the parameter before the step.
        squared: whether it is a second moment.
    """
    if wrong.rest(stated) <= wrong.error(stated):
        return []  # the other one departs, or neither does
    if right.rest(stated) > right.error(stated):
        # Something that was not recorded, such as a gradient scaler, may have scaled the gradients of both sides alike.
        scale = factor_between(right.gradient, right.went_in(stated))
        right, wrong = (replace(side, gradient=scale * side.gradient) for side in (right, wrong))
        if scale <= 0 or right.rest(stated) > right.error(stated):
            return []
    fits: list[Fit] = []

    def offer(signature: str, said: str, rest: float, error: float, claim: Claim) -> None:
        if accepted(rest, difference, error):
            fits.append(Fit(signature, said, rest, error, claim))

    for other in others:
        rest, error = wrong.rest(stated, old=other.value), wrong.error(stated, old=other.value)
        offer(other.signature, other.said, rest, error, Claim(other.said))
    error = wrong.error(stated)
    _offer_factor(offer, wrong, stated, error, squared)
    if not squared:
        _offer_decay(offer, wrong, stated, error, decay)
    _offer_keep(offer, wrong, stated, error)
    return fits


def _offer_factor(offer: Offer, wrong: Moment, stated: Average, error: float, squared: bool) -> None:
    factor = factor_between(wrong.gradient, wrong.went_in(stated))
    size = norm(wrong.gradient)
    if not size:
        return
    predicted = factor * wrong.gradient
    said = f"what went into it is {factor:.6g} times the {'square of the ' if squared else ''}gradient"
    claim = Claim("gradient", factor, error / stated.gain / size)
    offer(
        "constant_factor", said, wrong.rest(stated, gradient=predicted), wrong.error(stated, gradient=predicted), claim
    )


def _offer_decay(offer: Offer, wrong: Moment, stated: Average, error: float, decay: float) -> None:
    size = norm(wrong.before)
    if not size:
        return
    more = factor_between(wrong.before, wrong.went_in(stated) - wrong.gradient)
    uncertainty = error / stated.gain / size
    total = 0.0 if abs(more + decay) <= uncertainty else more + decay
    added = f"has {total:.4g} times the parameter added to it" if total else "has nothing of the parameter added to it"
    said = f"the gradient that went into it {added}, where {decay:.4g} times is stated"
    predicted = wrong.gradient + more * wrong.before
    error = wrong.error(stated, gradient=predicted)
    offer("weight_decay", said, wrong.rest(stated, gradient=predicted), error, Claim("decay", total, uncertainty))


def _offer_keep(offer: Offer, wrong: Moment, stated: Average, error: float) -> None:
    """Another beta: new - g = beta (old - g); of a buffer that takes the gradient whole, new - g = beta old."""
    behind = wrong.gradient if stated.gain != 1.0 else np.zeros_like(wrong.gradient)
    gap = wrong.old - behind
    if not norm(wrong.old):
        return  # what goes in is then all that can differ
    keep = factor_between(gap, wrong.new - wrong.gradient)
    changed = Average(keep, 1 - keep if stated.gain != 1.0 else 1.0)
    said = f"it keeps {keep:.6g} of itself from step to step, where {stated.keep:.6g} is stated"
    offer("constant_factor", said, wrong.rest(changed), error, Claim("keep", keep, error / max(norm(gap), TINY)))
