"""Which part of two runs to trace: what causes the first quantity in which their recordings differ.

Of different programs that is the first quantity beyond its bound. In float32 the bound is that of a whole run, and coarse: a
fault in a module may stay inside until the optimizer magnifies it. So once a quantity is beyond, the forward of its step is
looked through for the first value that differs `JUMP` times as much as all before it, or as one rounding. Rounding grows from
module to module, but not by that. What is traced is then compared within `JUMP` times what differs before. This decides where to
look, and no verdict.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from crossframe.errors import UsageError
from crossframe.recording import Recording
from crossframe.recording.lines import FORWARD, PARAMETERS, UNSHARDED
from crossframe.verdict import PairVerdict
from crossframe.verdict.bits import not_same_program
from crossframe.verdict.bounds import bounds_for
from crossframe.verdict.result import Judged

JUMP = 256.0


@dataclass(frozen=True)
class Target:
    """A part of a step.

    Attributes:
        phase, unit, rank: as `crossframe.operators.Request` has them.
        name: of the quantity that differs.
        tolerance: on values that count as the same; None: bits must be equal.
    """

    step: int
    phase: str
    unit: str
    rank: int
    name: str
    tolerance: float | None


def target_of(a: Recording, b: Recording, verdict: PairVerdict) -> Target | None:
    """The part to trace; None if the recordings do not differ anywhere.

    Runs of one program are compared in bits: there the first quantity that has other bits counts, whatever its size.

    Raises:
        UsageError: what differs was not computed by an operator, or is too coarse to be told from rounding.
    """
    where = verdict.first_divergence
    same_program = not_same_program(a, b) is None
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
            f"explain: {verdict.dtype} is too coarse to match values of different programs; record both in float32, or "
            "trace two runs of one program"
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
    """The first value in the forward of a step that differs far more than those before it, else the quantity beyond its bound.

    The number is by how much those before it differ, at least one rounding.
    """
    noise = unit_roundoff
    for each in judged:
        if each.step == beyond.step and each.phase == FORWARD and math.isfinite(each.difference):
            if each is beyond or each.difference > JUMP * noise:
                return each, noise
            noise = max(noise, each.difference)
    # Where forward agrees, what follows it is held against the bound of a run.
    return beyond, math.inf
