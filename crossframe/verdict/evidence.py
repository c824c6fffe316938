"""Evidence of a bug in differences as small as rounding: bits, reproduced causes, and directions."""

import math
from dataclasses import dataclass, replace

from crossframe.dtypes import coarser, unit_roundoff
from crossframe.recording.event_format import BACKWARD, FORWARD, NORM, REDUCE
from crossframe.verdict.bits import Bits, operator_difference
from crossframe.verdict.diagnosis import Diagnosis, diagnose
from crossframe.verdict.divergence_text import describe_quantity
from crossframe.verdict.findings import Findings
from crossframe.verdict.measure.judge import Judgement, judge
from crossframe.verdict.measure.locate import Divergence, locate, locate_sketch
from crossframe.verdict.measure.metrics import FEW_ROUNDINGS, distance
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.measure.quantities import Quantity, finite
from crossframe.verdict.perturbed_runs.directions import GAIN, TANH, Directions, Found
from crossframe.verdict.perturbed_runs.limits import Limits
from crossframe.verdict.unrecorded_causes import unseen
from crossframe.verdict.verdicts import Verdict

UNDECIDED = (Verdict.ROUNDING, Verdict.INCONCLUSIVE)
"""Verdicts that evidence from a direction or a reproduced cause can overrule."""
# Signatures whose hypotheses reproduce the computation operation by operation, so that they hold for any program.
_REPEATED = frozenset(
    {"norm_epsilon", "tanh_gelu", "low_precision_reduction", "missing_rank", "tied_weight", "dropout"}
)
_LEAST_ELEMENTS = 16
"""The number of elements from which on a hypothesis does not explain half of a difference by chance."""


@dataclass(frozen=True)
class Evidence:
    """A verdict that overrules the one by size, with its location and reason."""

    verdict: Verdict
    first: Judgement
    where: Divergence
    diagnosis: Diagnosis | None
    reason: str


def evidence_from_bits(
    pair: Pair,
    findings: Findings,
    bits: Bits | None,
    verdict: Verdict,
    names: tuple[str, str],
    limits: Limits | None,
    *,
    strict: bool,
) -> Evidence | None:
    """Return the verdict from bits; None if bits are not evidence or change nothing.

    A bug stays a bug, located where bits first differ unless the whole program is compiled. What exceeds a bound without
    perturbed runs is one too: all before it is equal, so no optimizer has amplified any rounding. Rounding stays rounding if the
    first difference is that of a few operations, which round in another way, or far below its bound in a compiled program, and
    no hypothesis explains it (`only_rounds`).

    Args:
        limits: measured on perturbed runs; None if there are none.
        strict: a difference of a few roundings is a different computation too.
    """
    first = _apart_in_bits(findings, bits)
    if bits is None or first is None or verdict is Verdict.INCOMPARABLE:
        return None
    if verdict is Verdict.BUG and (first.beyond or bits.compiled):
        return None
    q, where = first.quantity, _located_in_bits(first, pair)
    # Both were computed from the same bits, so the residual of a hypothesis is the rounding of a few operations.
    diagnosis = diagnose(pair, first, where, _few_roundings) if where.step in pair.steps else None
    if verdict is Verdict.ROUNDING and not strict and diagnosis is None and only_rounds(pair, first, bits, limits):
        return None
    size = "more than any known bound on rounding" if first.beyond else "within its bound"
    before = "everything recorded" if unseen(pair, where) else "everything"
    reason = (
        f"a different computation took place: at step {q.step} the {describe_quantity(first)} differs by "
        f"{first.difference:.1e} between {names[0]} and {names[1]}, {size}, but both are of the same program, and {before} "
        "before it is bitwise equal"
    )
    if bits.compiled:
        reason = f"{reason} (the whole program is compiled, so the change may be elsewhere in the step)"
    if not bits.repeated:
        reason = f"{reason}. If the run may be nondeterministic, record either run again and pass that recording with --repeat"
    is_bug = verdict is Verdict.BUG or (first.beyond and limits is None)
    return Evidence(Verdict.BUG if is_bug else Verdict.DIFFERENT, first, where, diagnosis, reason)


def _apart_in_bits(findings: Findings, bits: Bits | None) -> Judgement | None:
    """The first quantity that differs in bits; None if that is no evidence, or if its bits must be equal anyway."""
    first = findings.in_bits
    if bits is None or bits.objection is not None or first is None or first.quantity.bound is None:
        return None
    return first


def only_rounds(pair: Pair, first: Judgement, bits: Bits, limits: Limits | None) -> str:
    """Why both sides of the first quantity that differs in bits may be two formulas of one value, as words; "" if they
    are further apart than that.

    A gradient that is zero in exact arithmetic is nothing but rounding, whatever its values. Of others, see
    [Note: a few roundings]. Where a compiled program changes in one place, it rounds in another way everywhere, and on all ranks:
    the values of one of several are not judged so.
    """
    if first.quantity.phase in (BACKWARD, REDUCE) and first.quantity.bound == math.inf:
        return "in a gradient that is zero up to rounding"
    if is_few_roundings(pair, first.quantity):
        return "a few roundings"
    is_of_all = first.quantity.rank is None or pair.a.manifest.world_size == 1
    share = max(_LEAST_SHARE, limits.usual_share(first.quantity.kind) if limits else 0.0)
    is_far_below = bits.compiled and is_of_all and not first.beyond and first.used < share
    return f"less than {share:.0%} of its bound, in a compiled program" if is_far_below else ""


def is_few_roundings(pair: Pair, quantity: Quantity) -> bool:
    """Whether both sides of a quantity are as near as two formulas of one value. See [Note: a few roundings]."""
    alone = quantity.kind in (FORWARD, NORM)  # recorded as float64, whatever the dtype in which it was computed
    dtype = pair.dtype if alone else coarser(*quantity.dtypes)
    apart = distance(finite(quantity.a), finite(quantity.b))
    return apart <= FEW_ROUNDINGS * unit_roundoff(dtype) * max(quantity.scale, *quantity.norms)


def rounded_otherwise(
    pair: Pair, findings: Findings, bits: Bits | None, names: tuple[str, str], limits: Limits | None
) -> str:
    """Where one program first computed other bits, by as little as a few roundings, as a clause; "" if it did not."""
    first = _apart_in_bits(findings, bits)
    if bits is None or first is None or not (why := only_rounds(pair, first, bits, limits)):
        return ""
    q = first.quantity
    return (
        f"both are of the same program, and bits first differ at step {q.step} in the {describe_quantity(first)}, by "
        f"{first.difference:.1e} between {names[0]} and {names[1]}, {why}, although everything before it is equal: "
        "it is computed in another way (with --bitwise, this is a different computation)"
    )


_LEAST_SHARE = 0.01
"""The share of a bound, some hundred roundings, below which a difference in a compiled program says nothing."""


def earlier_bits(findings: Findings, bits: Bits | None, names: tuple[str, str]) -> str:
    """Where bits of a compiled program first differ, before the first difference beyond its bound, as a clause; "" if nowhere.

    A bug may begin there, and exceed its bounds only later. Where a compiled program changes, rounding changes too: a difference
    below `_LEAST_SHARE` says nothing.
    """
    first = _apart_in_bits(findings, bits)
    if bits is None or not bits.compiled or first is None or first.beyond or first.used < _LEAST_SHARE:
        return ""
    q = first.quantity
    return (
        f"bits first differ at step {q.step} in the {describe_quantity(first)}, by {first.difference:.1e} between {names[0]} and "
        f"{names[1]}, within its bound"
    )


def evidence_from_cause(
    pair: Pair, findings: Findings, bits: Bits | None, verdict: Verdict, names: tuple[str, str]
) -> Evidence | None:
    """Return a bug if a hypothesis reproduces the first quantity that differs in bits, operation by operation, from bitwise equal
    causes; None otherwise.

    This also holds between different wrappers and layouts.
    """
    first = findings.in_bits
    if bits is None or bits.repetition or verdict not in UNDECIDED or first is None or first.quantity.bound is None:
        return None
    if not pair.by_rank or first.quantity.step not in pair.steps or first.quantity.numel < _LEAST_ELEMENTS:
        return None
    if pair.coarser is not None:
        return None
    if pair.a.manifest.framework != pair.b.manifest.framework or operator_difference(pair, first.quantity) is not None:
        return None  # a different operator or kernel rounds elsewhere
    where = _located_in_bits(first, pair)
    diagnosis = diagnose(pair, first, where, _few_roundings)
    if diagnosis is None or diagnosis.signature not in _REPEATED:
        return None
    size = "more than its bound" if first.beyond else "within its bound"
    reason = (
        f"at step {where.step} the {describe_quantity(first)} differs by {first.difference:.1e} between {names[0]} and "
        f"{names[1]}, {size}, but everything before it is bitwise equal, and {diagnosis.evidence.rstrip('.')}"
    )
    return Evidence(Verdict.BUG, first, where, diagnosis, reason)


def _located_in_bits(judgement: Judgement, pair: Pair) -> Divergence:
    if judgement.quantity.sketched:
        return locate_sketch(judgement, pair)
    return locate(replace(judgement, quantity=replace(judgement.quantity, bound=None)), pair.b.manifest)


def evidence_from_direction(
    pair: Pair,
    findings: Findings,
    directions: Directions | None,
    limits: Limits | None,
    where: Divergence | None,
    names: tuple[str, str],
) -> Evidence | None:
    """Return a bug if a difference within the spread of perturbed runs has a direction, and no earlier quantity is outside; None
    otherwise."""
    if directions is None or limits is None or (found := directions.found) is None:
        return None
    if where is not None and where.step < found.stop - 1:
        return None
    judgement = replace(judge(found.quantity), beyond=True)
    reason = found.describe(names)
    if (apart := findings.in_bits) is not None and _is_cause(pair, apart.quantity, found):
        # The quantity with a direction is a consequence of the first bitwise difference of the same step.
        judgement, reason = apart, f"{reason}; in bits the first difference is {describe_quantity(apart)}"
    at = locate_sketch(judgement, pair)
    diagnosis = diagnose(pair, judgement, at, limits.limit) if at.step in pair.steps else None
    if found.direction == GAIN and diagnosis is None:
        diagnosis = Diagnosis("norm_epsilon", f"{reason}, as with another epsilon.")
    if found.direction == TANH:
        diagnosis = Diagnosis("tanh_gelu", f"{reason}.")
    return Evidence(Verdict.BUG, judgement, at, diagnosis, reason)


def _is_cause(pair: Pair, first: Quantity, found: Found) -> bool:
    """Whether the first bitwise difference causes a direction: it is in the step that shows the direction, and not due to a
    different kernel or framework."""
    same = pair.a.manifest.framework == pair.b.manifest.framework and pair.by_rank and pair.coarser is None
    return (
        same and first.bound is not None and first.step == found.stop - 1 and operator_difference(pair, first) is None
    )


def describe_bits(bits: Bits, findings: Findings) -> str:
    """The first bitwise difference, and why it is not evidence if so, as a clause."""
    first = f"the first difference in bits is {describe_quantity(findings.in_bits)} at step {findings.in_bits.quantity.step}"  # type: ignore[union-attr]
    return f"{first}; not used as evidence: {bits.objection}" if bits.objection else first


def _few_roundings(quantity: Quantity) -> float:
    """The bound on norm(a - b) for a few operations on the same bits: one unit in the last place of each element."""
    return 2 * max(unit_roundoff(dtype) for dtype in quantity.dtypes) * max(quantity.norms)
