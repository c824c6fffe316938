"""Explains an optimizer update that deviates from its rule.

The right side's update follows the rule from its own values before the step and its own moments after it. The wrong side's update
follows the rule with one change, which names the fault. Unknown constants (decay, epsilon) are fitted and reported.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from crossframe.verdict.diagnosis.fit import TINY, Claim, Fit, accepted, factor_between, is_uninformative
from crossframe.verdict.diagnosis.optimizer_rules import SGD, AdamW
from crossframe.verdict.measure.metrics import distance, norm

Rule = AdamW | SGD
Change = tuple[str, str, Rule, Claim]
"""(signature, description, changed rule, claim)."""


@dataclass(frozen=True)
class Update:
    """One side's update of a parameter, in float64.

    Attributes:
        before, after: the parameter.
        moments: after this step: (m, v) for AdamW, (buffer,) for SGD.
        roundoff: unit roundoff of the parameter's dtype.
    """

    before: np.ndarray
    after: np.ndarray
    moments: tuple[np.ndarray, ...]
    roundoff: float

    @property
    def moved(self) -> np.ndarray:
        return self.after - self.before

    def residual(self, rule: Rule) -> float:
        """The norm of the part of the update that a rule does not explain."""
        return distance(self.after, rule.updated(self.before, *self.moments))

    def error(self, rule: Rule) -> float:
        return rule.error(self.before, self.moved, self.roundoff)

    def way(self, rule: Rule) -> np.ndarray:
        """The update of a rule with a learning rate of 1."""
        return replace(rule, rate=1.0).updated(self.before, *self.moments) - self.before


FEW = 4.0
"""The tolerance, in multiples of the first-order bound, within which an update follows its rule."""


def follow_one_rule(a: Update, b: Update, stated: Rule) -> bool:
    """Whether both updates follow the rule from their own values, so that their difference was already in these values.

    Both may have the same other learning rate, due to a schedule.
    """
    if all(update.residual(stated) <= FEW * update.error(stated) for update in (a, b)):
        return True
    rule = replace(stated, rate=factor_between(a.way(stated), a.moved))
    return rule.rate > 0 and all(update.residual(rule) <= FEW * update.error(rule) for update in (a, b))


def update_deviations(
    right: Update,
    wrong: Update,
    stated: Rule,
    counted: float | None,
    difference: float,
    *,
    states_decay: bool = True,
) -> list[Fit]:
    """The changes to a rule that explain the wrong side's update, if the unchanged rule explains the right side's only.

    Args:
        stated: the rule; its rate is fitted to the right side if a schedule changed it.
        counted: the wrong side's own step count; None if not recorded.
        difference: norm(right - wrong).
        states_decay: whether a decay is stated; if not, it is fitted to the right side.
    """
    rule = stated
    if not states_decay and isinstance(rule, AdamW):
        rule = read_off(right, rule)
    if wrong.residual(rule) <= wrong.error(rule):
        return []  # the wrong side follows the rule
    if right.residual(rule) > right.error(rule):
        rule = replace(rule, rate=factor_between(right.way(rule), right.moved))
        if rule.rate <= 0 or right.residual(rule) > right.error(rule):
            return []
    fits = []
    for changes in (_of_correction, _of_decay, _of_epsilon, _of_rate):
        for signature, text, changed, claim in changes(rule, wrong, counted):
            residual, error = wrong.residual(changed), wrong.error(changed)
            if accepted(residual, difference, error):
                told = text if states_decay else text.replace("is stated", "is what the other side has")
                fits.append(Fit(signature, told, residual, error, claim))
        if fits:
            break  # more specific changes come first, and all of them are exact
    return fits


def read_off(side: Update, rule: AdamW) -> AdamW:
    """The rule with rate and decay fitted to a side's update; unchanged if the update does not follow it.

    A fitted decay within the rounding of a decay of 0 is 0.
    """
    terms = np.stack([rule.direction(*side.moments).reshape(-1), side.before.reshape(-1)], axis=1)
    rate, both = (float(x) for x in -np.linalg.lstsq(terms, side.moved.reshape(-1), rcond=None)[0])
    if rate <= 0:
        return rule
    bare = replace(rule, rate=rate, decay=0.0)
    uncertainty = side.error(bare) / max(norm(side.before), TINY)
    found = bare if abs(both) <= uncertainty else replace(bare, decay=both / rate)
    return found if side.residual(found) <= side.error(found) else rule


def _of_rate(rule: Rule, wrong: Update, counted: float | None) -> Iterator[Change]:
    way = wrong.way(rule)
    rate = factor_between(way, wrong.moved)
    if rate > 0:
        factor = rate / rule.rate
        uncertainty = wrong.error(rule) / max(norm(way) * rule.rate, TINY)
        if abs(factor - 1) <= 2 * uncertainty:
            return
        text = (
            f"the update is {factor:.6g} times that of the optimizer's rule, as with a learning rate of {rate:.4g} instead of "
            f"{rule.rate:.4g}"
        )
        yield "constant_factor", text, replace(rule, rate=rate), Claim("rate", factor, uncertainty)


def _of_correction(rule: Rule, wrong: Update, counted: float | None) -> Iterator[Change]:
    if not isinstance(rule, AdamW):
        return
    for text, changed in (
        ("neither moment is", replace(rule, count_m=None, count_v=None)),
        ("the first moment is not", replace(rule, count_m=None)),
        ("the second moment is not", replace(rule, count_v=None)),
    ):
        yield "bias_correction", f"{text} bias-corrected", changed, Claim(text)
    due = int(rule.count_m or 0)
    for count in _likely_counts(due, counted):
        text = f"both moments are bias-corrected for step {count} instead of step {due}"
        changed = replace(rule, count_m=count, count_v=count)
        if counted == count or (count == 1 and due > 2):
            yield "lost_step", f"{text}: the optimizer's step count was lost", changed, Claim("count", count)
        else:
            yield "bias_correction", text, changed, Claim("count", count)


def _likely_counts(due: int, counted: float | None) -> list[int]:
    """Wrong step counts to try: the first step, the neighbours of the due step, and the recorded count.

    Not all counts are tried, because some count always scales an update as another learning rate would.
    """
    return sorted({1, due - 1, due + 1, int(counted or 0)} - {due, 0})


def _of_epsilon(rule: Rule, wrong: Update, counted: float | None) -> Iterator[Change]:
    if not isinstance(rule, AdamW):
        return
    inside = replace(rule, epsilon_in_root=True)
    text = f"epsilon ({rule.epsilon:.4g}) is added inside the square root"
    yield "optimizer_epsilon", text, inside, Claim("epsilon in root")
    for where, form in (("outside", rule), ("inside", inside)):
        fitted = _fit_epsilon(form, wrong)
        uncertainty = wrong.error(fitted) / max(norm(fitted.slope(*wrong.moments)), TINY)
        text = f"epsilon is {fitted.epsilon:.4g} {where} the square root, while {rule.epsilon:.4g} outside it is stated"
        yield "optimizer_epsilon", text, fitted, Claim(f"epsilon {where} root", fitted.epsilon, uncertainty)


def _fit_epsilon(rule: AdamW, wrong: Update) -> AdamW:
    """The best-fitting epsilon, by Gauss-Newton from several starting values."""
    found = []
    for start in (0.0, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2):
        now = replace(rule, epsilon=start)
        for _ in range(40):
            slope = now.slope(*wrong.moments).reshape(-1)
            residual = (wrong.after - now.updated(wrong.before, *wrong.moments)).reshape(-1)
            down = float(slope @ slope)
            if not 0 < down < math.inf:
                break
            epsilon = max(now.epsilon + float(slope @ residual) / down, now.epsilon / 8)
            if abs(epsilon - now.epsilon) <= 1e-12 * epsilon:
                break
            now = replace(now, epsilon=epsilon)
        found.append(now)
    return min(found, key=wrong.residual)


def _of_decay(rule: Rule, wrong: Update, counted: float | None) -> Iterator[Change]:
    """The decay that explains an update: the residual without decay, as a multiple of the parameter before the step."""
    size = norm(wrong.before)
    if isinstance(rule, SGD) or not size:
        return  # the decay of SGD is part of its buffer
    bare = replace(rule, decay=0.0)
    left = wrong.after - bare.updated(wrong.before, *wrong.moments)
    decay = -factor_between(wrong.before, left) / rule.rate
    # The decay that rounding alone can produce.
    uncertainty = wrong.error(bare) / size / rule.rate
    if abs(decay - rule.decay) <= 2 * uncertainty:
        return  # below the resolution of the dtype
    if abs(decay) <= uncertainty:
        decay = 0.0
    text = _said_of_decay(decay, rule.decay, uncertainty, rule.rate)
    yield "weight_decay", text, replace(rule, decay=decay), Claim("decay", decay, uncertainty)


def _said_of_decay(decay: float, stated: float, uncertainty: float, rate: float) -> str:
    if decay == 0.0:
        return f"the weight decay is missing, while a decay of {stated:.4g} is stated"
    if abs(decay * rate - stated) <= uncertainty * rate:
        return f"the weight decay of {stated:.4g} is not multiplied by the learning rate of {rate:.4g}"
    if abs(decay + stated) <= uncertainty:
        return f"the weight decay of {stated:.4g} has the wrong sign"
    digits = next((digits for digits in (4, 6, 9) if f"{decay:.{digits}g}" != f"{stated:.{digits}g}"), 17)
    return f"the weight decay is {decay:.{digits}g}, while {stated:.{digits}g} is stated"


@dataclass(frozen=True)
class Added:
    """A multiple of the parameter by which the wrong side differs."""

    factor: float
    error: float
    residual: float


def added_decay(sides: tuple[np.ndarray, np.ndarray], before: np.ndarray, tolerance: float) -> Added | None:
    """Fit wrong = right + factor * parameter; None if this does not explain the difference, or if the parameter is constant.

    Args:
        sides: updates or gradients of the right and the wrong side.
        before: the parameter before the step.
    """
    if is_uninformative(before):
        return None
    apart = sides[1] - sides[0]
    factor = factor_between(before, apart)
    residual = distance(apart, factor * before)
    return Added(factor, tolerance / norm(before), residual) if accepted(residual, norm(apart), tolerance) else None


def epsilons_of_ratio(
    moved: tuple[np.ndarray, np.ndarray], squares: np.ndarray, tolerance: float
) -> tuple[str, float] | None:
    """(text, residual) of different epsilons in updates n / (root + epsilon) with the same n, whatever n is.

    Then y (root + epsilon of y) = x (root + epsilon of x) for the updates x and y, which is linear in both epsilons. A root
    without bias correction is as good, because its factor multiplies both epsilons.

    Args:
        moved: updates of the right and the wrong side.
        squares: the second moment below the root.
    """
    x, y = (side.reshape(-1) for side in moved)
    if (squares < 0).any():
        return None
    root = np.sqrt(squares).reshape(-1)
    for text, power in (("an epsilon", 1), ("an epsilon inside the root", 2)):
        left, right, below = x**power, y**power, root**power
        terms = np.stack([right, -left], axis=1)
        size = norm(left * below)
        (wrong, own), *_ = np.linalg.lstsq(terms, (left - right) * below, rcond=None)
        under = below + max(wrong, 0.0)
        ratio = (below + max(own, 0.0)) / np.where(under > 0, under, np.inf)
        predicted = x * ratio ** (1 / power)
        if size and accepted(distance(y, predicted), distance(x, y), tolerance):
            return text, distance(y, predicted)
    return None
