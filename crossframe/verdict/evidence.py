"""Evidence of a bug in differences of a size that rounding also has: bits, causes that a hypothesis repeats, directions."""

from dataclasses import dataclass, replace

from crossframe.dtypes import unit_roundoff
from crossframe.verdict.bits import Bits, other_operator
from crossframe.verdict.diagnosis import Diagnosis, diagnose
from crossframe.verdict.direction import GAIN, TANH, Directions, Found
from crossframe.verdict.envelope import Envelope
from crossframe.verdict.findings import Findings
from crossframe.verdict.kinds import Verdict
from crossframe.verdict.measure.judge import Judgement, judge
from crossframe.verdict.measure.locate import Divergence, locate, locate_sketch
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.measure.quantities import Quantity
from crossframe.verdict.words import called

UNDECIDED = (Verdict.ROUNDING, Verdict.INCONCLUSIVE)
"""Verdicts that evidence of a direction or of a repeated cause can overrule."""
# What a hypothesis repeats operation by operation, so that it explains a difference whatever program it is found in.
_REPEATED = frozenset(
    {"norm_epsilon", "tanh_gelu", "low_precision_reduction", "missing_rank", "tied_weight", "dropout"}
)
_LEAST_ELEMENTS = 16
"""A hypothesis that explains half of the difference of so many elements does not do so by chance."""


@dataclass(frozen=True)
class Evidence:
    """A verdict that overrules the one by size, and where it applies."""

    verdict: Verdict
    first: Judgement
    where: Divergence
    diagnosis: Diagnosis | None
    said: str


def by_bits(
    pair: Pair, findings: Findings, bits: Bits | None, verdict: Verdict, names: tuple[str, str]
) -> Evidence | None:
    """The verdict where bits are evidence; None where they are not, or change nothing.

    A bug stays a bug. It is located where bits first differ, unless the program is compiled as a whole.
    """
    first = findings.in_bits
    if (
        bits is None
        or bits.why_not is not None
        or first is None
        or first.quantity.bound is None
        or verdict is Verdict.INCOMPARABLE
    ):
        return None
    if verdict is Verdict.BUG and (first.beyond or bits.compiled):
        return None
    q = first.quantity
    where = locate_sketch(first, pair) if q.sketched else _located_in_bits(first, pair)
    # Both were computed from the same bits: what a hypothesis leaves unexplained is the rounding of a few operations.
    diagnosis = diagnose(pair, first, where, _few_roundings) if where.step in pair.steps else None
    size = "larger than any bound known for rounding" if first.beyond else "of a size that rounding also has"
    said = (
        f"a different computation took place: at step {q.step} the {called(first)} differs by {first.difference:.1e} between "
        f"{names[0]} and {names[1]}, {size}, but both are of the same program, and everything before it is equal in every bit"
    )
    if bits.compiled:
        said = f"{said} (compiled as a whole, so that the change may lie elsewhere in the step)"
    if not bits.repeated:
        said = f"{said}. If it may be nondeterministic, record either run again and pass that recording with --repeat"
    return Evidence(Verdict.BUG if verdict is Verdict.BUG else Verdict.DIFFERENT, first, where, diagnosis, said)


def by_cause(
    pair: Pair, findings: Findings, bits: Bits | None, verdict: Verdict, names: tuple[str, str]
) -> Evidence | None:
    """A bug where the first quantity that differs in bits is what a hypothesis predicts, operation by operation, from causes that
    are equal in every bit. That holds between other wrappers and layouts too; None otherwise."""
    first = findings.in_bits
    if bits is None or bits.repetition or verdict not in UNDECIDED or first is None or first.quantity.bound is None:
        return None
    if not pair.same_world or first.quantity.step not in pair.steps or first.quantity.numel < _LEAST_ELEMENTS:
        return None
    if pair.coarser is not None:
        return None
    if pair.a.manifest.framework != pair.b.manifest.framework or other_operator(pair, first.quantity) is not None:
        return None  # another framework's operator, or another kernel, rounds at other places
    where = locate_sketch(first, pair) if first.quantity.sketched else _located_in_bits(first, pair)
    diagnosis = diagnose(pair, first, where, _few_roundings)
    if diagnosis is None or diagnosis.signature not in _REPEATED:
        return None
    said = (
        f"at step {where.step} the {called(first)} differs by {first.difference:.1e} between {names[0]} and {names[1]}, a size "
        f"that rounding also has, but everything before it is equal in every bit, and {diagnosis.evidence.rstrip('.')}"
    )
    return Evidence(Verdict.BUG, first, where, diagnosis, said)


def _located_in_bits(judgement: Judgement, pair: Pair) -> Divergence:
    return locate(replace(judgement, quantity=replace(judgement.quantity, bound=None)), pair.b.manifest)


def by_direction(
    pair: Pair,
    findings: Findings,
    directions: Directions | None,
    envelope: Envelope | None,
    where: Divergence | None,
    names: tuple[str, str],
) -> Evidence | None:
    """A bug where a difference inside the spread of perturbed runs has a direction, before anything is outside of it."""
    if directions is None or envelope is None or (found := directions.found) is None:
        return None
    if where is not None and where.step < found.stop - 1:
        return None
    judgement = replace(judge(found.quantity), beyond=True)
    said = found.in_words(names)
    if (apart := findings.in_bits) is not None and _is_cause(pair, apart.quantity, found):
        # Of the same step, and with causes equal in every bit: what has a direction is its consequence.
        judgement, said = apart, f"{said}; in bits the first difference is {called(apart)}"
    at = locate_sketch(judgement, pair)
    diagnosis = diagnose(pair, judgement, at, envelope.limit) if at.step in pair.steps else None
    if found.direction == GAIN and diagnosis is None:
        diagnosis = Diagnosis("norm_epsilon", f"{said}, as with another epsilon.")
    if found.direction == TANH:
        diagnosis = Diagnosis("tanh_gelu", f"{said}.")
    return Evidence(Verdict.BUG, judgement, at, diagnosis, said)


def _is_cause(pair: Pair, first: Quantity, found: Found) -> bool:
    """Whether the first quantity that differs in bits is where a direction begins: in the step that shows it, and not for another
    kernel or framework."""
    same = pair.a.manifest.framework == pair.b.manifest.framework and pair.same_world and pair.coarser is None
    return same and first.bound is not None and first.step == found.stop - 1 and other_operator(pair, first) is None


def bits_in_words(bits: Bits, findings: Findings) -> str:
    """What equal and different bits say, in a clause."""
    first = f"the first difference in bits is {called(findings.in_bits)} at step {findings.in_bits.quantity.step}"  # type: ignore[union-attr]
    return f"{first}; not used as evidence: {bits.why_not}" if bits.why_not else first


def _few_roundings(quantity: Quantity) -> float:
    """How far the results of a few operations on the same bits may lie apart: a unit in the last place of each element."""
    return 2 * max(unit_roundoff(dtype) for dtype in quantity.dtypes) * max(quantity.norms)
