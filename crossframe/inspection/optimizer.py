"""Finds steps that did not follow the optimizer's rule, by comparing the recorded values before and after them.

`crossframe.verdict.diagnosis.optimizer_rules` defines the rules and their rounding errors. Two numbers are fitted instead of
taken from the manifest: the learning rate, which may follow a schedule, and the scale of the gradients, which may change after
they were recorded, for example by clipping. One factor is fitted for each parameter. Only parameters whose factor differs from
that of the other parameters of their group are reported.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from crossframe.inspection.values import finite_or_none
from crossframe.recording import Recording
from crossframe.recording.event_format import REDUCE, STATE, UNSHARDED, UPDATE, before_step
from crossframe.recording.known_settings import GROUPS
from crossframe.verdict.diagnosis.case import Case
from crossframe.verdict.diagnosis.fit import best, factor_between, factor_roundoff
from crossframe.verdict.diagnosis.moment_deviations import Moment, moment_deviations
from crossframe.verdict.diagnosis.optimizer_hypotheses import average_of, moment_of, update_of
from crossframe.verdict.diagnosis.optimizer_rules import SGD
from crossframe.verdict.diagnosis.stated_optimizer import MOMENTS, SGD_, Stated, stated_rule
from crossframe.verdict.diagnosis.update_deviations import Update, update_deviations
from crossframe.verdict.measure.metrics import distance, norm
from crossframe.verdict.measure.quantities import Quantity


@dataclass(frozen=True)
class Departure:
    """A step that did not follow the optimizer's rule, in the same way for some parameters.

    Attributes:
        step: the step.
        name: "update", or the name of an optimizer state entry.
        parameters: names of the parameters.
        share: the largest fraction of the step, over these parameters, that the rule does not explain.
        evidence: another rule that explains it; "" if no known rule does.
    """

    step: int
    name: str
    parameters: tuple[str, ...]
    share: float
    evidence: str

    def describe(self) -> str:
        """The finding in a sentence.

        >>> Departure(3, "update", ("h.0.w",), 0.5, "").describe()
        "step 3: the update of 'h.0.w' does not follow the optimizer's rule: it leaves 0.5 of it unexplained"
        """
        first, *others = self.parameters
        more = f" and {len(others)} more" if others else ""
        why = self.evidence or f"it leaves {self.share:.2g} of it unexplained"
        return f"step {self.step}: the {self.name} of {first!r}{more} does not follow the optimizer's rule: {why}"

    def to_json(self) -> dict:
        """The finding as a JSON object."""
        return {
            **asdict(self),
            "parameters": list(self.parameters),
            "share": finite_or_none(self.share),
            "description": self.describe(),
        }


@dataclass(frozen=True)
class _Checked:
    """The result for one parameter: the fitted factor and its error, or a departure."""

    parameter: str
    factor: float = math.nan
    error: float = math.nan
    share: float = 0.0
    evidence: str = ""
    follows: bool = True


def optimizer_deviations(recording: Recording) -> tuple[list[Departure], list[str]]:
    """All departures in the order of steps, and notes on fitted factors and on steps that were not inspected."""
    kind = recording.manifest.settings.get("optimizer")
    if not isinstance(kind, str) or kind not in MOMENTS:
        known = f"the rule of {kind!r} is not known" if isinstance(kind, str) else "the recording states none"
        return [], [f"the optimizer's steps were not examined: {known}, expected one of {', '.join(MOMENTS)}"]
    found: list[Departure] = []
    notes = _Notes()
    num = 0
    for step in recording.recorded_steps():
        num += _examine(recording, kind, step, found, notes)
    if not num:
        return [], ["the optimizer's steps were not examined: no two steps in a row were recorded in full"]
    return found, notes.sentences()


def optimizer_deviations_at(recording: Recording, step: int) -> list[Departure]:
    """The departures of a recorded step; none if the optimizer's rule is not known."""
    kind, found = recording.manifest.settings.get("optimizer"), []
    if kind in MOMENTS:
        _examine(recording, kind, step, found, _Notes())
    return found


def _examine(recording: Recording, kind: str, step: int, found: list[Departure], notes: "_Notes") -> int:
    """Add the departures of a step to `found`; returns the number of updates and moments that were compared with the rule."""
    num = 0
    names = [name for name in recording.manifest.params if _is_whole(recording, step, name)]
    for slot in (*MOMENTS[kind], ""):
        checked = [each for name in names if (each := _check(recording, kind, step, name, slot)) is not None]
        num += len(checked)
        found += _findings(recording, step, slot, checked, notes)
    return num


class _Notes:
    """Collects the factors that all parameters of a step share."""

    def __init__(self) -> None:
        self._rates: list[tuple[int, float]] = []
        self._scales: list[tuple[int, float]] = []

    def add(self, step: int, slot: str, factor: float) -> None:
        (self._scales if slot else self._rates).append((step, factor))

    def sentences(self) -> list[str]:
        lines = []
        for what, factors in (
            ("the step is {} times the one at the stated learning rate, as under a schedule", self._rates),
            ("gradients were multiplied by {} between the reduction and the optimizer, as clipping does", self._scales),
        ):
            if factors:
                (step, factor), steps = factors[0], {step for step, _ in factors}
                others = len(steps) - 1
                more = f" (likewise at {others} more step{'s' * (others > 1)})" if others else ""
                lines.append(f"step {step}: {what.format(f'{factor:.6g}')}{more}")
        return lines


def _is_whole(recording: Recording, step: int, name: str) -> bool:
    """Whether all elements of an update were recorded, before and after the step."""
    before = before_step(step)
    slots = recording.state_slots(step, name)
    return (
        recording.has(UPDATE, step, name)
        and recording.has(REDUCE, step, name)
        and recording.has(*before, name)
        and not any(recording.is_sketched(*at, name) for at in ((UPDATE, step), before, (REDUCE, step)))
        and not any(recording.is_sketched(STATE, step, name, slot) for slot in slots)
        and "max_exp_avg_sq" not in slots  # AMSGrad, for which there is no rule
    )


def _check(recording: Recording, kind: str, step: int, name: str, slot: str) -> _Checked | None:
    """Compare an update (`slot` is "") or a moment with its rule; None if it was not fully recorded, or is not finite."""
    count = recording.count(step, name) or step + 1
    stated = stated_rule(recording.manifest, kind, count, name)
    if stated is None or (slot and kind == SGD_ and not getattr(stated.rule, "momentum", 0.0)):
        return None
    case = _case(recording, step, name, STATE if slot else UPDATE, slot)
    with np.errstate(all="ignore"):
        return _check_moment(case, stated, slot) if slot else _check_update(case, stated)


def _case(recording: Recording, step: int, name: str, phase: str, slot: str) -> Case:
    empty = np.zeros(0)
    unit = recording.manifest.unit_of[name]
    quantity = Quantity(step, phase, "", unit, name, None, 0, empty, empty, 1.0, None, use=slot)
    return Case(quantity, recording, recording, ("the recording", "the recording"), (0, 0), 0.0)


def _check_update(case: Case, stated: Stated) -> _Checked | None:
    seen = update_of(case, case.right, stated)
    if seen is None or not all(np.isfinite(each).all() for each in (seen.before, seen.after, *seen.moments)):
        return None
    seen = replace(seen, before=_as_seen(case, seen))
    rule = stated.rule
    error = seen.error(rule) / max(norm(seen.way(rule)) * rule.rate, np.finfo(float).tiny)
    nesterov = _as_nesterov(case, seen, stated)
    known = [seen] if nesterov is None else [seen, nesterov]
    if any(tried.residual(rule) <= tried.error(rule) for tried in known):
        return _Checked(case.name, 1.0, error)
    for tried in known:
        fitted = replace(rule, rate=factor_between(tried.way(rule), tried.moved))
        if tried.residual(fitted) <= tried.error(fitted):
            return _Checked(case.name, fitted.rate / rule.rate, error)
    ideal = Update(seen.before, rule.updated(seen.before, *seen.moments), seen.moments, seen.roundoff)
    fit = best(update_deviations(ideal, seen, rule, None, distance(ideal.after, seen.after)))
    share = seen.residual(rule) / max(norm(ideal.moved), norm(seen.moved))
    return _Checked(case.name, share=share, evidence=fit.evidence if fit else "", follows=False)


def _as_nesterov(case: Case, seen: Update, stated: Stated) -> Update | None:
    """The update of SGD with Nesterov momentum, which manifests do not state: g + momentum * b, where g is the gradient that was
    added to b."""
    old = case.moment(case.right, case.step - 1, case.name, MOMENTS[SGD_][0])
    if not isinstance(stated.rule, SGD) or old is None:
        return None
    buffer, momentum = seen.moments[0], stated.rule.momentum
    return replace(seen, moments=(buffer - momentum * old.astype(np.float64) + momentum * buffer,))


def _as_seen(case: Case, seen: Update) -> np.ndarray:
    """The parameter before the step, in forward, since the loop may have changed it after the previous update."""
    own = case.own(case.right, UNSHARDED, case.step, 0, case.name)
    after = case.read(case.right, UPDATE, case.step, case.name)
    same = own is not None and after is not None and own.dtype == after.dtype
    return np.asarray(own, np.float64) if same else seen.before


def _check_moment(case: Case, stated: Stated, slot: str) -> _Checked | None:
    average, squared = average_of(stated.rule, slot, MOMENTS[stated.kind])
    seen = moment_of(case, case.right, stated, squared)
    if seen is None or not all(np.isfinite(each).all() for each in (seen.old, seen.new, seen.gradient)):
        return None
    size = norm(seen.gradient)
    error = seen.error(average) / average.gain / size if size else 0.0
    if seen.residual(average) <= seen.error(average) or not size:
        return _Checked(case.name, 1.0, error)
    factor = factor_between(seen.gradient, seen.went_in(average))
    scaled = replace(seen, gradient=factor * seen.gradient)
    scaled_error = scaled.error(average) + average.gain * factor_roundoff(scaled.gradient)
    if not stated.coupled and scaled.residual(average) <= scaled_error:
        root = float(np.sqrt(factor)) if squared and factor > 0 else factor
        return _Checked(case.name, root, error / abs(factor) if factor else error)
    ideal = Moment(seen.old, average.new(seen.old, seen.gradient), seen.gradient, seen.before, seen.roundoff)
    difference = distance(ideal.new, seen.new)
    fits = moment_deviations(ideal, seen, average, [], difference, decay=stated.coupled, squared=squared)
    share = difference / max(norm(ideal.new - seen.old), norm(seen.new - seen.old))
    fit = best(fits)
    return _Checked(case.name, share=share, evidence=fit.evidence if fit else "", follows=False)


def _findings(
    recording: Recording, step: int, slot: str, checked: Sequence[_Checked], notes: _Notes
) -> Iterator[Departure]:
    """The departures of one step, joined by kind."""
    apart = [each for each in checked if not each.follows]
    for group in _groups(recording, [each for each in checked if each.follows]):
        middle = sorted(group, key=lambda each: each.factor)[(len(group) - 1) // 2]
        # A parameter that is large next to its step has a factor with few known digits.
        reference = min((each for each in group if not _differ(each, middle)), key=lambda each: each.error)
        usual, moved = reference.factor, [each for each in group if _differ(each, reference)]
        if usual != 1.0:
            notes.add(step, slot, usual)
        what = "the input of the moment is" if slot else "the step is"
        for each in moved:
            evidence = (
                f"{what} {each.factor / usual if usual else each.factor:.6g} times as large as for other parameters"
            )
            apart.append(
                replace(each, share=abs(each.factor - usual) / max(abs(usual), abs(each.factor)), evidence=evidence)
            )
    kinds: dict[str, list[_Checked]] = {}
    for each in apart:
        kinds.setdefault(each.evidence, []).append(each)
    for evidence, some in kinds.items():
        names = tuple(each.parameter for each in some)
        yield Departure(step, slot or "update", names, max(each.share for each in some), evidence)


def _differ(a: _Checked, b: _Checked) -> bool:
    """Whether two factors differ by more than their errors."""
    return abs(a.factor - b.factor) > 2 * (a.error + b.error) * max(1.0, abs(b.factor)) + 1e-6


def _groups(recording: Recording, checked: Sequence[_Checked]) -> list[list[_Checked]]:
    """The parameters by parameter group of the optimizer."""
    listed = recording.manifest.settings.get(GROUPS) or []
    found: dict[int, list[_Checked]] = {}
    for each in checked:
        at = next((i for i, group in enumerate(listed) if each.parameter in group["params"]), -1)
        found.setdefault(at, []).append(each)
    return list(found.values())
