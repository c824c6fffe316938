"""The hypothesis that one side is a multiple of the other: a sum for a mean, a lost division, a decay."""

import math
from collections.abc import Iterator

import numpy as np

from crossframe.recording.event_format import FORWARD, UNSHARDED
from crossframe.verdict.diagnosis.case import Case
from crossframe.verdict.diagnosis.factor_fits import Factor, counts_of, factor_of, name_of
from crossframe.verdict.diagnosis.fit import PLAIN, Claim, Contrast, Fit, accepted
from crossframe.verdict.measure.metrics import norm

SHRUNK = 0.9
"""A smaller factor between parameters and their values at the end of the step before is no weight decay."""
UNRELATED = 0.1
"""The largest residual of gradients that a factor multiplies, as a share of their difference."""


def constant_factor(case: Case) -> Iterator[Fit]:
    """wrong = c * right. Symmetric, so tried with one assignment of sides only."""
    if case.swapped:
        return
    sides = _over_ranks(case)
    factor = factor_of(sides)
    if factor is None:
        return
    # An activation is more likely scaled by one of its own sizes than by a number of ranks.
    sizes = _sizes(case)
    runs = (case.wrong, case.right)
    counts = [sizes] if sizes else [counts_of(run.manifest, run.num_microbatches) for run in runs]
    names = (name_of(factor.value, error, each) for error in (factor.noise, factor.error) for each in counts)
    name = next((name for name in names if name), None)
    also = ""
    if name is None and is_shifted(sides, factor.error):
        if not _gradients_have(case, factor):
            return
        also = ", and so do the gradients that follow from it"
    text = f"{case.names[1]} has {factor.value:.6g} times the values of {case.names[0]}"
    if case.quantity.within:
        text = f"the unsharded values are {factor.value:.6g} times the shards"
        if case.phase == UNSHARDED and name is None and SHRUNK < factor.value < 1:
            text += ": they were multiplied outside of the optimizer's step, as by a weight decay"
            yield Fit("weight_decay", text, factor.residual, 0.0, Claim(PLAIN, factor.value, factor.error))
            return
    claim = Claim(PLAIN, factor.value, factor.error)
    error = factor.roundoff if name else 0.0  # a fitted constant is never exact
    yield Fit("constant_factor", f"{text}{f' ({name})' if name else ''}{also}", factor.residual, error, claim)


def _gradients_have(case: Case, factor: Factor) -> bool:
    """Whether all gradients of the step together are multiplied by the factor of a loss, up to `UNRELATED` of their difference.

    A single loss cannot show a factor; the gradient of a loss to which something was added is not multiplied.
    """
    if case.quantity.event != "loss":
        return False
    products = np.zeros(3)
    for name, spec in case.right.manifest.params.items():
        sides = (case.gradient(each, case.step, name) for each in (case.right, case.wrong))
        x, y = (np.zeros(spec.shape) if side is None else np.asarray(side, np.float64) for side in sides)
        products += [np.vdot(x, x), np.vdot(x, y), np.vdot(y, y)]
    xx, xy, yy = map(float, products)
    if not xx or not math.isfinite(xx + yy):
        return False
    value = xy / xx
    residual = math.sqrt(max(yy - value * xy, 0.0))
    difference = math.sqrt(max(xx - 2 * xy + yy, 0.0))
    if not accepted(residual, difference, UNRELATED * difference):
        return False
    return abs(value - factor.value) <= factor.error + residual / math.sqrt(xx)


def is_shifted(sides: Contrast, error: float) -> bool:
    """Whether an added constant explains the difference as well as a factor, as it does for a single number or equal numbers."""
    added = float(np.mean(sides.wrong - sides.right))
    return sides.residual(sides.right + added) <= error * norm(sides.right)


def _sizes(case: Case) -> dict[str, float]:
    """The sizes by which an activation may have been scaled."""
    shape = case.both.right.shape
    return {"the size of its last dim": float(shape[-1])} if case.phase == FORWARD and len(shape) > 1 else {}


def _over_ranks(case: Case) -> Contrast:
    """A loss or norm together with those of the other ranks, for a better fit."""
    if case.quantity.rank is None:
        return case.sides
    if case.quantity.event == "loss":
        rows = [recording.losses()[case.step] for recording in (case.right, case.wrong)]
    elif case.quantity.event == "grad_norm":
        rows = [
            np.array([recording.grad_norm(case.step, rank) for rank in range(recording.manifest.world_size)], float)
            for recording in (case.right, case.wrong)
        ]
    else:
        return case.sides
    if rows[0].size != rows[1].size:
        return case.sides
    return Contrast(rows[0], rows[1], case.limit * math.sqrt(rows[0].size))
