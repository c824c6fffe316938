"""How an optimizer's update departs from the rule that it should follow.

One side's update is explained by its rule, from that side's own values before the step and its own moments after it: that side
is right. The other side's is explained by the rule with one thing changed, from its own values too: that names the fault.
Constants that are not among the usual ones (another decay, another epsilon) are fitted, and said.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from crossframe.verdict.diagnosis.fit import Claim, Fit, accepted, factor_between
from crossframe.verdict.diagnosis.optimizer_rules import SGD, AdamW
from crossframe.verdict.measure.metrics import distance, norm

TINY = np.finfo(np.float64).tiny
Rule = AdamW | SGD
Change = tuple[str, str, Rule, Claim]
"""Signature, how it is said, the changed rule, and its claim."""


@dataclass(frozen=True)
class Update:
    """What one side's optimizer made of a parameter, in float64.

    Attributes:
        before, after: the parameter.
        moments: after this step's gradient: (m, v) of AdamW, (buffer,) of SGD.
        roundoff: of the dtype of the parameter.
    """

    before: np.ndarray
    after: np.ndarray
    moments: tuple[np.ndarray, ...]
    roundoff: float

    @property
    def moved(self) -> np.ndarray:
        """By what the parameter changed."""
        return self.after - self.before

    def rest(self, rule: Rule) -> float:
        """What a rule leaves unexplained."""
        return distance(self.after, rule.updated(self.before, *self.moments))

    def error(self, rule: Rule) -> float:
        """What rounding may leave."""
        return rule.error(self.before, self.moved, self.roundoff)

    def way(self, rule: Rule) -> np.ndarray:
        """Where a rule goes at a learning rate of 1."""
        return replace(rule, rate=1.0).updated(self.before, *self.moments) - self.before


FEW = 4.0
"""How many times its bound, which is of first order, an update may be off from its rule and still follow it."""


def follow_one_rule(a: Update, b: Update, stated: Rule) -> bool:
    """Whether both updates follow the rule, from their own values: what they differ by was in these already.

    A schedule may make another rate of the stated one, the same for both.
    """
    if all(update.rest(stated) <= FEW * update.error(stated) for update in (a, b)):
        return True
    rule = replace(stated, rate=factor_between(a.way(stated), a.moved))
    return rule.rate > 0 and all(update.rest(rule) <= FEW * update.error(rule) for update in (a, b))


def update_deviations(
    right: Update,
    wrong: Update,
    stated: Rule,
    counted: float | None,
    difference: float,
    *,
    states_decay: bool = True,
) -> list[Fit]:
    """The changes to a rule that explain the wrong side's update, where the rule itself explains the right side's and not this.

    Args:
        stated: its rate, where a schedule makes another of it, is corrected by the right side.
        counted: how many steps the wrong side's own count says it has taken; None where it was not recorded.
        difference: norm of what is to be explained.
        states_decay: whether a decay is stated at all; if not, the right side says which it has.
    """
    rule = stated
    if not states_decay and isinstance(rule, AdamW):
        rule = read_off(right, rule)
    if wrong.rest(rule) <= wrong.error(rule):
        return []  # the other one departs, or neither does
    if right.rest(rule) > right.error(rule):
        rule = replace(rule, rate=factor_between(right.way(rule), right.moved))
        if rule.rate <= 0 or right.rest(rule) > right.error(rule):
            return []
    fits = []
    for changes in (_of_correction, _of_decay, _of_epsilon, _of_rate):
        for signature, said, changed, claim in changes(rule, wrong, counted):
            rest, error = wrong.rest(changed), wrong.error(changed)
            if accepted(rest, difference, error):
                told = said if states_decay else said.replace("is stated", "is what the other side has")
                fits.append(Fit(signature, told, rest, error, claim))
        if fits:
            break  # the more specific go first, and all of these are exact
    return fits


def read_off(side: Update, rule: AdamW) -> AdamW:
    """The rule with the rate and the decay that a side's update has; as it is where another rule is followed.

    A decay below what rounding may leave of none is none.
    """
    terms = np.stack([rule.direction(*side.moments).reshape(-1), side.before.reshape(-1)], axis=1)
    rate, both = (float(x) for x in -np.linalg.lstsq(terms, side.moved.reshape(-1), rcond=None)[0])
    if rate <= 0:
        return rule
    bare = replace(rule, rate=rate, decay=0.0)
    uncertainty = side.error(bare) / max(norm(side.before), TINY)
    found = bare if abs(both) <= uncertainty else replace(bare, decay=both / rate)
    return found if side.rest(found) <= side.error(found) else rule


def _of_rate(rule: Rule, wrong: Update, counted: float | None) -> Iterator[Change]:
    way = wrong.way(rule)
    rate = factor_between(way, wrong.moved)
    if rate > 0:
        factor = rate / rule.rate
        uncertainty = wrong.error(rule) / max(norm(way) * rule.rate, TINY)
        if abs(factor - 1) <= 2 * uncertainty:
            return
        said = (
            f"the parameter moves {factor:.6g} times as far as its rule says, as with a learning rate of {rate:.4g} for "
            f"{rule.rate:.4g}"
        )
        yield "constant_factor", said, replace(rule, rate=rate), Claim("rate", factor, uncertainty)


def _of_correction(rule: Rule, wrong: Update, counted: float | None) -> Iterator[Change]:
    if not isinstance(rule, AdamW):
        return
    for said, changed in (
        ("neither moment is", replace(rule, count_m=None, count_v=None)),
        ("the first moment is not", replace(rule, count_m=None)),
        ("the second moment is not", replace(rule, count_v=None)),
    ):
        yield "bias_correction", f"{said} corrected for its start at zero", changed, Claim(said)
    due = int(rule.count_m or 0)
    for count in _likely_counts(due, counted):
        said = f"both moments are corrected as at step {count} of the optimizer, where it is step {due}"
        changed = replace(rule, count_m=count, count_v=count)
        if counted == count or (count == 1 and due > 2):
            yield "lost_step", f"{said}: its count of steps was lost", changed, Claim("count", count)
        else:
            yield "bias_correction", said, changed, Claim("count", count)


def _likely_counts(due: int, counted: float | None) -> list[int]:
    """Other steps as of which moments may be corrected: the first, those beside the one that is due, and the one that is counted.
    Not any: some step or other scales an update as another learning rate does."""
    own = [] if counted is None or counted < 1 else [int(counted)]
    return sorted({1, due - 1, due + 1, *own} - {due, 0})


def _of_epsilon(rule: Rule, wrong: Update, counted: float | None) -> Iterator[Change]:
    if not isinstance(rule, AdamW):
        return
    inside = replace(rule, epsilon_in_root=True)
    said = f"epsilon, {rule.epsilon:.4g}, stands inside of the root"
    yield "optimizer_epsilon", said, inside, Claim("epsilon in root")
    for where, form in (("outside of", rule), ("inside of", inside)):
        fitted = _fit_epsilon(form, wrong)
        uncertainty = wrong.error(fitted) / max(norm(fitted.slope(*wrong.moments)), TINY)
        said = f"epsilon is {fitted.epsilon:.4g} {where} the root, where {rule.epsilon:.4g} outside of it is stated"
        yield "optimizer_epsilon", said, fitted, Claim(f"epsilon {where} root", fitted.epsilon, uncertainty)


def _fit_epsilon(rule: AdamW, wrong: Update) -> AdamW:
    """The epsilon that explains an update best, by Gauss and Newton from several sizes on."""
    found = []
    for start in (0.0, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2):
        now = replace(rule, epsilon=start)
        for _ in range(40):
            slope = now.slope(*wrong.moments).reshape(-1)
            rest = (wrong.after - now.updated(wrong.before, *wrong.moments)).reshape(-1)
            down = float(slope @ slope)
            if not 0 < down < math.inf:
                break
            epsilon = max(now.epsilon + float(slope @ rest) / down, now.epsilon / 8)
            if abs(epsilon - now.epsilon) <= 1e-12 * epsilon:
                break
            now = replace(now, epsilon=epsilon)
        found.append(now)
    return min(found, key=wrong.rest)


def _of_decay(rule: Rule, wrong: Update, counted: float | None) -> Iterator[Change]:
    """The decay that explains an update: the residual without decay, as a multiple of the parameter before the step."""
    size = norm(wrong.before)
    if isinstance(rule, SGD) or not size:
        return  # SGD's is in its buffer
    bare = replace(rule, decay=0.0)
    left = wrong.after - bare.updated(wrong.before, *wrong.moments)
    decay = -factor_between(wrong.before, left) / rule.rate
    # The decay that rounding alone may suggest.
    uncertainty = wrong.error(bare) / size / rule.rate
    if abs(decay - rule.decay) <= 2 * uncertainty:
        return  # below the resolution of the dtype, which both sides may be off by
    if abs(decay) <= uncertainty and rule.decay:
        decay = 0.0
    said = _said_of_decay(decay, rule.decay, uncertainty, rule.rate)
    yield "weight_decay", said, replace(rule, decay=decay), Claim("decay", decay, uncertainty)


def _said_of_decay(decay: float, stated: float, uncertainty: float, rate: float) -> str:
    if decay == 0.0:
        return f"the parameter is not decayed, where a decay of {stated:.4g} is stated"
    if stated and abs(decay * rate - stated) <= uncertainty * rate:
        return f"the parameter shrinks by {stated:.4g} of itself, and not by {stated:.4g} times the learning rate of {rate:.4g}"
    if stated and abs(decay + stated) <= uncertainty:
        return f"the decay of {stated:.4g} has the wrong sign"
    digits = next((digits for digits in (4, 6, 9) if f"{decay:.{digits}g}" != f"{stated:.{digits}g}"), 17)
    return f"the parameter decays by {decay:.{digits}g} times the learning rate, where {stated:.{digits}g} is stated"
