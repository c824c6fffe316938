"""Hypotheses about an optimizer step, from each side's own recorded values."""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from crossframe.grad_norm import EPSILON
from crossframe.recording import Recording
from crossframe.recording.event_format import BACKWARD, REDUCE, STATE, UPDATE
from crossframe.verdict.diagnosis.case import Case
from crossframe.verdict.diagnosis.fit import Claim, Fit, accepted, factor_between, roundoff_of
from crossframe.verdict.diagnosis.moment_deviations import Moment, Other, moment_deviations
from crossframe.verdict.diagnosis.optimizer_rules import SGD, Average
from crossframe.verdict.diagnosis.stated_optimizer import MOMENTS, Stated, rule_at, rule_of, slots_of
from crossframe.verdict.diagnosis.update_deviations import (
    Rule,
    Update,
    added_decay,
    epsilons_of_ratio,
    follow_one_rule,
    update_deviations,
)
from crossframe.verdict.measure.metrics import distance, norm
from crossframe.verdict.measure.values import assemble


def optimizer(case: Case) -> Iterator[Fit]:
    """The wrong side's optimizer deviates from its rule, and the right side's follows it."""
    if case.phase not in (STATE, UPDATE):
        return
    kind, other = rule_of(case.right), case.wrong.manifest.settings.get("optimizer")
    if kind is None or (other in MOMENTS and other != kind):
        return
    stated = rule_at(case.right, kind, case.step, case.name, case.wrong)
    if stated is None:
        return
    if case.phase == UPDATE:
        yield from _update(case, stated)
    elif case.quantity.use in slots_of(case.right, kind):
        yield from _moment(case, stated)


def change_of_update(case: Case) -> Iterator[Fit]:
    """The update differs by a multiple of the parameter or of itself, or in an epsilon, where no rule of the optimizer explains
    either side: it is not known, or the loop changes parameters outside of the optimizer.

    Both sides start from equal parameters, and their optimizer states agree, because they come earlier.
    """
    if case.phase != UPDATE:
        return
    if any(_follows_rule(case, recording) for recording in (case.right, case.wrong)):
        return
    before = case.in_both(lambda recording: case.before(recording, case.step, case.name))
    if before is None:
        return
    start = [case.cut(each) for each in before]
    moved = case.sides.right - start[0], case.sides.wrong - start[1]
    tolerance = case.limit + case.sides.roundoff * 4 * norm(start[0])
    if distance(*start) > tolerance or not norm(moved[0]):
        return
    if fit := added_decay(moved, start[0], tolerance):
        text = f"the update of {case.names[1]} subtracts {-fit.factor:.4g} times the parameter more than that of {case.names[0]}"
        yield Fit("weight_decay", text, fit.residual, 0.0, Claim("decay of update", fit.factor, fit.error))
        return
    if case.swapped:
        return
    factor = factor_between(*moved)
    residual = distance(moved[1], factor * moved[0])
    if factor > 0 and accepted(residual, distance(*moved), tolerance):
        text = f"the update of {case.names[1]} is {factor:.6g} times that of {case.names[0]}, as with another learning rate"
        yield Fit("constant_factor", text, residual, 0.0, Claim("rate", factor, tolerance / norm(moved[0])))
        return
    for slot in case.right.state_slots(case.step, case.name):
        squares = case.moment(case.right, case.step, case.name, slot)
        if squares is not None and (found := epsilons_of_ratio(moved, case.cut(squares), tolerance)):
            text = f"the updates are in the ratio that {found[0]} below the update, next to the root of {slot}, gives"
            yield Fit("optimizer_epsilon", text, found[1], 0.0, Claim("epsilon of ratio"))
            return


def _follows_rule(case: Case, recording: Recording) -> bool:
    """Whether a known rule explains an update of this recording."""
    kind = rule_of(recording)
    if kind is None or (stated := rule_at(recording, kind, case.step, case.name)) is None:
        return False
    update = update_of(case, recording, stated)
    return update is not None and follow_one_rule(update, update, stated.rule)


def decay_in_gradient(case: Case) -> Iterator[Fit]:
    """A gradient contains a multiple of its parameter."""
    if case.phase not in (BACKWARD, REDUCE):
        return
    before = case.before(case.right, case.step, case.name)
    if before is None:
        return
    tolerance = case.limit + 4 * case.sides.roundoff * norm(case.sides.wrong)
    fit = added_decay((case.sides.right, case.sides.wrong), case.cut(before), tolerance)
    if fit and fit.factor > 0:  # else the other side has it
        text = f"the gradient of {case.names[1]} contains {fit.factor:.4g} times the parameter, that of {case.names[0]} does not"
        yield Fit("weight_decay", text, fit.residual, 0.0, Claim("decay", fit.factor, fit.error))


def follows(case: Case) -> bool:
    """Whether both sides follow the stated rule: updates from their own moments, or moments from their own gradients.

    They then differ only because of their inputs and rounding. False if this is unknown.
    """
    if case.phase not in (STATE, UPDATE) or case.quantity.sketched:
        return False
    kind = rule_of(case.right)
    if kind is None or kind != rule_of(case.wrong):
        return False
    stated = rule_at(case.right, kind, case.step, case.name, case.wrong)
    if stated is None:
        return False
    if case.phase == STATE:
        if case.quantity.use not in slots_of(case.right, kind):
            return False
        average, squared = average_of(stated.rule, case.quantity.use, slots_of(case.right, kind))
        moments = case.in_both(lambda recording: moment_of(case, recording, stated, squared))
        return moments is not None and all(moment.follows(average) for moment in moments)
    updates = case.in_both(lambda recording: update_of(case, recording, stated))
    return updates is not None and follow_one_rule(*updates, stated.rule)


def _update(case: Case, stated: Stated) -> Iterator[Fit]:
    if (sides := case.in_both(lambda recording: update_of(case, recording, stated))) is None:
        return
    right, wrong = sides
    wrong = replace(wrong, roundoff=min(right.roundoff, wrong.roundoff))
    counted = case.wrong.count(case.step, case.name)
    states = stated.states_decay
    for fit in update_deviations(right, wrong, stated.rule, counted, case.sides.difference, states_decay=states):
        yield _of_side(case, fit)


def update_of(case: Case, recording: Recording, stated: Stated) -> Update | None:
    before = case.before(recording, case.step, case.name)
    after = case.read(recording, UPDATE, case.step, case.name)
    moments = [case.moment(recording, case.step, case.name, slot) for slot in slots_of(recording, stated.kind)]
    if isinstance(stated.rule, SGD) and not stated.rule.momentum:
        moments = [_gradient(case, recording, stated)]
    if before is None or after is None or not moments or any(moment is None for moment in moments):
        return None
    wide = tuple(case.cut(moment) for moment in moments if moment is not None)
    return Update(case.cut(before), case.cut(after), wide, roundoff_of(after))


def _moment(case: Case, stated: Stated) -> Iterator[Fit]:
    slot = case.quantity.use
    average, squared = average_of(stated.rule, slot, slots_of(case.right, stated.kind))
    if (sides := case.in_both(lambda recording: moment_of(case, recording, stated, squared))) is None:
        return
    right, wrong = sides
    # Use the finer roundoff, so that the rounding of a moment in a coarser dtype is not excused.
    wrong = replace(wrong, roundoff=min(right.roundoff, wrong.roundoff))
    others, difference = _other_moments(case, wrong.old), case.sides.difference
    for fit in moment_deviations(right, wrong, average, others, difference, decay=stated.coupled, squared=squared):
        yield _of_side(case, fit, _reason(case, fit, stated, average, squared))


def _reason(case: Case, fit: Fit, stated: Stated, average: Average, squared: bool) -> str:
    """A clause that attributes a factor on the input of a moment to another beta or to clipping; "" otherwise."""
    factor = fit.claim.value
    if fit.claim.kind != "gradient" or factor is None:
        return ""
    if beta := _as_beta(case, factor, average, squared, slots_of(case.right, stated.kind)):
        return beta
    kept = _clipping(case, case.wrong, stated) ** (2 if squared else 1)
    if kept != 1.0 and abs(factor * kept - 1) <= fit.claim.error * kept + 1e-6:
        return f", as without clipping to {stated.clip:g}"
    shrinks = 0 < factor < 1 and math.isinf(stated.clip)
    return ", as with clipped gradients, which are not stated" if shrinks else ""


def _as_beta(case: Case, value: float, average: Average, squared: bool, slots: tuple[str, ...]) -> str:
    """A clause that attributes a factor on the input of one moment to another beta, because the other moment agrees."""
    slot = slots[0] if squared else slots[-1]
    if average.gain == 1.0:
        return ""
    others = case.in_both(lambda recording: case.moment(recording, case.step, case.name, slot))
    if others is None:
        return ""
    sides = [case.cut(each) for each in others]
    # With another factor on the gradient, the other moment would differ accordingly.
    factor = math.sqrt(abs(value)) if squared else value**2
    if distance(*sides) > 0.01 * abs(factor - 1) * norm(sides[0]):
        return ""
    beta, name = 1 - value * average.gain, "beta2" if squared else "beta1"
    if not 0 <= beta < 1:
        return ""
    return f", as with {name} = {beta:.6g} instead of {average.keep:.6g}: {slot} agrees, so the gradients agree"


def average_of(rule: Rule, slot: str, slots: tuple[str, ...]) -> tuple[Average, bool]:
    """(rule of a moment, whether it is a second moment), where `slots` are those of the rule."""
    if isinstance(rule, SGD):
        return Average(rule.momentum, 1.0), False
    squared = slot == slots[-1]
    beta = rule.beta2 if squared else rule.beta1
    return Average(beta, 1 - beta), squared


def moment_of(case: Case, recording: Recording, stated: Stated, squared: bool) -> Moment | None:
    slot = case.quantity.use
    old = case.moment(recording, case.step - 1, case.name, slot)
    new = case.moment(recording, case.step, case.name, slot)
    before, gradient = case.before(recording, case.step, case.name), _gradient(case, recording, stated)
    if old is None or new is None or before is None or gradient is None:
        return None
    goes_in = np.square(gradient) if squared else gradient
    wide = [case.cut(each) for each in (old, new, goes_in, before)]
    return Moment(wide[0], wide[1], wide[2], wide[3], roundoff_of(new))


def _gradient(case: Case, recording: Recording, stated: Stated) -> np.ndarray | None:
    """The input of the moments: the reduced gradient after clipping, with its decay."""
    grad = case.read(recording, REDUCE, case.step, case.name)
    before = case.before(recording, case.step, case.name)
    if grad is None or before is None:
        return None
    decay = stated.coupled * np.asarray(before, np.float64)
    return _clipping(case, recording, stated) * np.asarray(grad, np.float64) + decay


def _clipping(case: Case, recording: Recording, stated: Stated) -> float:
    """The clipping factor at this step (R30)."""
    if math.isinf(stated.clip):
        return 1.0
    names = [name for name in recording.manifest.params if recording.has(REDUCE, case.step, name)]
    replica = case.replica_of(recording)
    total = norm(np.array([assemble(recording, REDUCE, case.step, name, "", replica).norm for name in names]))
    return min(1.0, stated.clip / (total + EPSILON))


def _other_moments(case: Case, old: np.ndarray) -> Iterator[Other]:
    """Values that the wrong side may have used instead of its old moment."""
    if case.step == 0:
        return
    slot, own, last, params = case.quantity.use, case.name, case.step - 1, case.wrong.manifest.params
    yield Other("lost_step", f"{slot} starts from zero at this step: its previous value is lost", np.zeros_like(old))
    others = [("stale_copy", f"{slot} of one step earlier", last - 1, own, slot)]
    for theirs in case.wrong.state_slots(last, own):
        if theirs != slot:
            others.append(("mixed_parameters", f"{theirs} instead of {slot}", last, own, theirs))
    for name, spec in params.items():
        if name != own and spec.numel == params[own].numel:
            others.append(("mixed_parameters", f"{slot} of {name!r}", last, name, slot))
    for signature, text, step, name, theirs in others:
        if (value := case.moment(case.wrong, step, name, theirs)) is not None:
            yield Other(signature, f"this step continues from {text}", case.cut(value).reshape(old.shape))


def _of_side(case: Case, fit: Fit, also: str = "") -> Fit:
    text = f"{case.names[0]} follows the optimizer's rule; in {case.names[1]} {fit.evidence}{also}"
    return Fit(fit.signature, text, fit.residual, fit.error, fit.claim)


ALL = (optimizer, change_of_update, decay_in_gradient)
