"""Explains an optimizer moment that deviates from its running average.

As in `update_deviations`, the right side's moment follows the rule from its own values, and the wrong side's follows it with one
change.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from crossframe.verdict.diagnosis.fit import TINY, Claim, Fit, accepted, factor_between, factor_roundoff
from crossframe.verdict.diagnosis.optimizer_rules import Average
from crossframe.verdict.diagnosis.update_deviations import FEW
from crossframe.verdict.measure.metrics import distance, norm


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

    def residual(self, average: Average) -> float:
        """The norm of the part that a rule does not explain."""
        return distance(self.new, average.new(self.old, self.gradient))

    def error(self, average: Average) -> float:
        return average.error(self.old, self.gradient, self.roundoff)

    def follows(self, average: Average) -> bool:
        """Whether the residual is within `FEW` times the first-order bound."""
        return self.residual(average) <= FEW * self.error(average)

    def went_in(self, average: Average) -> np.ndarray:
        """The gradient that explains the new moment."""
        return (self.new - average.keep * self.old) / average.gain


Change = tuple[str, str, Moment, Average, float, Claim]
"""(signature, description, the wrong side with the change, its rule, further rounding by the change, claim)."""


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
    fits = []
    for signature, text, changed, rule, more, claim in _changes(wrong, stated, others, decay, squared):
        residual, error = changed.residual(rule), changed.error(rule) + more
        if accepted(residual, difference, error):
            fits.append(Fit(signature, text, residual, error, claim))
    return fits


def _changes(wrong: Moment, stated: Average, others: Iterable[Other], decay: float, squared: bool) -> Iterator[Change]:
    for other in others:
        yield other.signature, other.text, replace(wrong, old=other.value), stated, 0.0, Claim(other.text)
    yield _of_factor(wrong, stated, squared)
    if not squared:
        yield _of_decay(wrong, stated, decay)
    if norm(wrong.old):  # else only the gradient can differ
        yield _of_keep(wrong, stated)


def _of_factor(wrong: Moment, stated: Average, squared: bool) -> Change:
    factor = factor_between(wrong.gradient, wrong.went_in(stated))
    gradient = factor * wrong.gradient
    text = f"the input of the moment is {factor:.6g} times the {'square of the ' if squared else ''}gradient"
    claim = Claim("gradient", factor, wrong.error(stated) / stated.gain / max(norm(wrong.gradient), TINY))
    more = stated.gain * factor_roundoff(gradient)
    return "constant_factor", text, replace(wrong, gradient=gradient), stated, more, claim


def _of_decay(wrong: Moment, stated: Average, decay: float) -> Change:
    factor = factor_between(wrong.before, wrong.went_in(stated) - wrong.gradient)
    added, uncertainty = factor * wrong.before, wrong.error(stated) / stated.gain / max(norm(wrong.before), TINY)
    total = 0.0 if abs(factor + decay) <= uncertainty else factor + decay
    includes = f"includes {total:.4g} times the parameter" if total else "does not include the parameter"
    text = f"the gradient in the moment {includes}, while {decay:.4g} times is stated"
    changed, more = replace(wrong, gradient=wrong.gradient + added), stated.gain * factor_roundoff(added)
    return "weight_decay", text, changed, stated, more, Claim("decay", total, uncertainty)


def _of_keep(wrong: Moment, stated: Average) -> Change:
    """Another beta: new - g = beta (old - g), or new - g = beta old for a buffer with a gain of 1."""
    gap = wrong.old if stated.gain == 1.0 else wrong.old - wrong.gradient
    keep = factor_between(gap, wrong.new - wrong.gradient)
    changed, more = Average(keep, 1.0 if stated.gain == 1.0 else 1 - keep), factor_roundoff(keep * gap)
    text = f"its decay rate is {keep:.6g}, while {stated.keep:.6g} is stated"
    uncertainty = (wrong.error(changed) + more) / max(norm(gap), TINY)
    return "constant_factor", text, wrong, changed, more, Claim("keep", keep, uncertainty)
