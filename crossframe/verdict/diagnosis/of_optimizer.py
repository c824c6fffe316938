"""Hypotheses about an optimizer's step, from what each side's own recording holds of it."""

from collections.abc import Iterator

import numpy as np

from crossframe.grad_norm import EPSILON
from crossframe.recording import Manifest, Recording
from crossframe.recording.lines import REDUCE, STATE, UPDATE
from crossframe.verdict.diagnosis.case import Case
from crossframe.verdict.diagnosis.departures import Rule, Update, departures
from crossframe.verdict.diagnosis.fit import Fit, roundoff_of
from crossframe.verdict.diagnosis.moments import Moment, Other, moment_departures
from crossframe.verdict.diagnosis.rules import SGD, AdamW, Average
from crossframe.verdict.metrics import norm
from crossframe.verdict.quantities import COUNT
from crossframe.verdict.sides import put_together

MOMENTS = {"AdamW": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",)}
"""By optimizer, as settings name it, the slots that its update reads."""


def optimizer(case: Case) -> Iterator[Fit]:
    """What the wrong side's optimizer did otherwise than its rule says, and than the right side's did."""
    kind = case.right.manifest.settings.get("optimizer")
    if kind not in MOMENTS or kind != case.wrong.manifest.settings.get("optimizer") or case.quantity.sketched:
        return
    if case.phase == UPDATE:
        yield from _update(case, kind)
    elif case.phase == STATE and case.quantity.use in MOMENTS[kind] and case.quantity.use != COUNT:
        yield from _moment(case, kind)


def _update(case: Case, kind: str) -> Iterator[Fit]:
    sides = [_update_of(case, recording, kind) for recording in (case.right, case.wrong)]
    if sides[0] is None or sides[1] is None:
        return
    rule = stated_rule(case.right.manifest, kind, case.right.count(case.step, case.name) or case.step + 1)
    counted = case.wrong.count(case.step, case.name)
    for fit in departures(sides[0], sides[1], rule, counted, case.both.difference):
        yield _of_side(case, fit)


def stated_rule(manifest: Manifest, kind: str, count: float) -> Rule:
    """The rule that the manifest states, at the optimizer's step `count`. What it leaves out is as torch and optax have it."""
    settings, rate = manifest.settings, manifest.learning_rate or 1.0
    decay = float(settings.get("weight_decay", 0.01 if kind == "AdamW" else 0.0))
    if kind == "SGD":
        return SGD(rate, float(settings.get("momentum", 0.0)), decay, float(settings.get("dampening", 0.0)))
    beta1, beta2 = settings.get("betas", (0.9, 0.999))
    return AdamW(rate, float(beta1), float(beta2), float(settings.get("eps", 1e-8)), decay, count, count)


def _update_of(case: Case, recording: Recording, kind: str) -> Update | None:
    before = case.before(recording, case.step, case.name)
    after = case.read(recording, UPDATE, case.step, case.name)
    slots = MOMENTS[kind]
    moments = [case.moment(recording, case.step, case.name, slot) for slot in slots]
    if kind == "SGD" and moments[0] is None and not recording.manifest.settings.get("momentum"):
        moments = [_gradient(case, recording, kind)]
    if before is None or after is None or any(moment is None for moment in moments):
        return None
    wide = [np.asarray(moment, np.float64) for moment in moments]
    return Update(np.asarray(before, np.float64), np.asarray(after, np.float64), tuple(wide), roundoff_of(after))


def _moment(case: Case, kind: str) -> Iterator[Fit]:
    slot, settings = case.quantity.use, case.right.manifest.settings
    rule = stated_rule(case.right.manifest, kind, case.step + 1)
    stated, squared, decay = _average(rule, slot, case.step)
    sides = [_moment_of(case, recording, kind, slot, squared) for recording in (case.right, case.wrong)]
    if sides[0] is None or sides[1] is None:
        return
    others = list(_other_moments(case, slot))
    fits = moment_departures(sides[0], sides[1], stated, others, case.both.difference, decay=decay, squared=squared)
    clipped = _clipping(case, case.wrong)
    for fit in fits:
        yield _of_side(case, fit, _as_unclipped(fit, clipped, squared, settings.get("clip")))


def _as_unclipped(fit: Fit, clipped: float, squared: bool, clip: float | None) -> str:
    """That a factor is what clipping would have taken away."""
    undone = 1 / clipped**2 if squared else 1 / clipped
    if fit.story.kind != "gradient" or fit.story.value is None or clipped == 1.0:
        return ""
    return (
        f", as without clipping to {clip:g}" if abs(fit.story.value - undone) <= fit.story.error + 1e-6 * undone else ""
    )


def _average(rule: Rule, slot: str, step: int) -> tuple[Average, bool, float]:
    """The rule of a moment, whether it is of squares, and how much of the parameter its gradient holds."""
    if isinstance(rule, SGD):
        # The first buffer is the gradient itself.
        gain = 1.0 if step == 0 else 1.0 - rule.dampening
        return Average(rule.momentum, gain), False, rule.decay
    if slot == "exp_avg_sq":
        return Average(rule.beta2, 1 - rule.beta2), True, 0.0
    return Average(rule.beta1, 1 - rule.beta1), False, 0.0


def _moment_of(case: Case, recording: Recording, kind: str, slot: str, squared: bool) -> Moment | None:
    old = case.moment(recording, case.step - 1, case.name, slot)
    new = case.moment(recording, case.step, case.name, slot)
    before, gradient = case.before(recording, case.step, case.name), _gradient(case, recording, kind)
    if old is None or new is None or before is None or gradient is None:
        return None
    goes_in = np.square(gradient) if squared else gradient
    wide = [np.asarray(each, np.float64) for each in (old, new, goes_in, before)]
    return Moment(wide[0], wide[1], wide[2], wide[3], roundoff_of(new))


def _gradient(case: Case, recording: Recording, kind: str) -> np.ndarray | None:
    """What goes into the moments: the reduced gradient, clipped, and under SGD with its decay."""
    grad = case.read(recording, REDUCE, case.step, case.name)
    before = case.before(recording, case.step, case.name)
    if grad is None or before is None:
        return None
    rule = stated_rule(recording.manifest, kind, case.step + 1)
    decay = rule.decay if isinstance(rule, SGD) else 0.0
    return _clipping(case, recording) * np.asarray(grad, np.float64) + decay * np.asarray(before, np.float64)


def _clipping(case: Case, recording: Recording) -> float:
    """What clipping multiplies gradients by at this step (R30)."""
    clip = recording.manifest.settings.get("clip")
    if clip is None:
        return 1.0
    names = [name for name in recording.manifest.params if recording.has(REDUCE, case.step, name)]
    replica = case.replica_of(recording)
    total = norm(np.array([put_together(recording, REDUCE, case.step, name, "", replica).norm for name in names]))
    return min(1.0, float(clip) / (total + EPSILON))


def _other_moments(case: Case, slot: str) -> Iterator[Other]:
    """What may have stood in the place of the wrong side's moment before the step."""
    step, wrong = case.step, case.wrong
    own = case.moment(wrong, step - 1, case.name, slot)
    if step == 0 or own is None:
        return
    yield Other("lost_step", f"{slot} begins anew at this step: what was there before is lost", np.zeros(own.shape))
    older = case.moment(wrong, step - 2, case.name, slot)
    if older is not None:
        yield Other(
            "stale_copy", f"this step goes on from {slot} as it was a step earlier", np.asarray(older, np.float64)
        )
    for theirs in wrong.state_slots(step - 1, case.name):
        if theirs not in (slot, COUNT) and (value := case.moment(wrong, step - 1, case.name, theirs)) is not None:
            yield Other(
                "mixed_parameters", f"this step goes on from {theirs} in the place of {slot}", np.asarray(value, float)
            )
    for name, spec in wrong.manifest.params.items():
        if name == case.name or spec.numel != own.size:
            continue
        if (value := case.moment(wrong, step - 1, name, slot)) is not None:
            said = f"this step goes on from {slot} of {name!r}"
            yield Other("mixed_parameters", said, np.asarray(value, np.float64).reshape(own.shape))


def _of_side(case: Case, fit: Fit, also: str = "") -> Fit:
    said = f"{case.names[0]} follows the optimizer's rule; in {case.names[1]} {fit.evidence}{also}"
    return Fit(fit.signature, said, fit.rest, fit.error, fit.story)


ALL = (optimizer,)
