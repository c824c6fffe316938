"""Selects the part of two runs to trace: the one that computes the first quantity in which their recordings differ.

For different programs that is the first quantity beyond its bound. In float32 the bound is that of a whole run and therefore
coarse: a fault in a module may stay inside it until the optimizer magnifies it. So, if a quantity is beyond its bound, the
search continues in the forward of its step, for the first value that differs more than `JUMP` times as much as all values
before it, and as one rounding. Rounding errors grow from module to module, but not by that much. The traces are then compared
with a tolerance of `JUMP` times the largest earlier difference. This selects where to look, and does not affect the verdict.

In bfloat16 and float16, values of different programs are not matched: they differ by a hundredth, and within such a tolerance the
signatures of unrelated values agree, since these do not depend on the order of elements.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from crossframe.errors import UsageError
from crossframe.recording import Recording
from crossframe.recording.event_format import FORWARD, PARAMETERS, UNSHARDED
from crossframe.verdict import PairVerdict
from crossframe.verdict.bits import program_difference
from crossframe.verdict.measure.bounds_by_dtype import bounds_for
from crossframe.verdict.result import Judged

JUMP = 256.0


@dataclass(frozen=True)
class Target:
    """The part of a step to trace.

    Attributes:
        step, phase, unit, rank: as in `crossframe.operators.Request`.
        name: name of the quantity that differs.
        tolerance: relative difference up to which values count as equal; None: they must be equal bit for bit.
    """

    step: int
    phase: str
    unit: str
    rank: int
    name: str
    tolerance: float | None


def target_of(a: Recording, b: Recording, verdict: PairVerdict, *, bitwise: bool = True) -> Target | None:
    """The part to trace; None if the recordings do not differ anywhere.

    Args:
        bitwise: compare runs of the same program bit for bit: any difference counts, whatever its size.

    Raises:
        UsageError: no operator computes the quantity that differs, or the dtype is too coarse to distinguish it from rounding.
    """
    where = verdict.first_divergence
    same_program = bitwise and program_difference(a, b) is None
    beyond = next((each for each in verdict.judged if (not each.equal if same_program else each.beyond)), None)
    if beyond is None:
        return None
    if beyond.phase in (PARAMETERS, UNSHARDED):
        raise UsageError(
            f"explain: the first difference is the {beyond.phase} value of {beyond.name!r} at step {beyond.step}, which no "
            f"operator of the model computes; see crossframe compare: {verdict.reason}"
        )
    bounds = bounds_for(verdict.dtype)
    if not same_program and not bounds.decisive:
        raise UsageError(
            f"explain: {verdict.dtype} is too coarse to match values of different programs; record both in float32 or float64 "
            "and explain those. crossframe explain RUN of each tests its operators against their own bounds in "
            f"{verdict.dtype}, which shows inaccurate ones but no other constant or formula"
        )
    tolerance = None
    if not same_program:
        beyond, noise = _jump(verdict.judged, beyond, bounds.unit_roundoff)
        tolerance = min(bounds.parameter, max(bounds_for("float64").parameter, JUMP * noise))
    here = where is not None and (where.step, where.phase, where.unit) == (beyond.step, beyond.phase, beyond.unit)
    rank = where.rank if here and where is not None and where.rank is not None else 0
    name = beyond.name or beyond.event
    return Target(beyond.step, beyond.phase, beyond.unit, rank, name, tolerance)


def _jump(judged: Iterable[Judged], beyond: Judged, unit_roundoff: float) -> tuple[Judged, float]:
    """The first value in the forward of a step that differs far more than the values before it, or else the quantity beyond its
    bound; and the largest difference before it, at least one rounding."""
    noise = unit_roundoff
    for each in judged:
        if each.step == beyond.step and each.phase == FORWARD and math.isfinite(each.difference):
            if each is beyond or each.difference > JUMP * noise:
                return each, noise
            noise = max(noise, each.difference)
    # Forward agrees, so the quantities after it are tested against the bound of a run.
    return beyond, math.inf
