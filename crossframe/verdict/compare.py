"""Two recordings in, a verdict out."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from crossframe.dtypes import unit_roundoff
from crossframe.recording import Recording
from crossframe.recording.known_settings import COMMAND
from crossframe.recording.lines import FORWARD, PARAMETERS, STATE, UPDATE
from crossframe.verdict.bits import Bits, bits_of, other_operator
from crossframe.verdict.clipping import clipped_on_one_side
from crossframe.verdict.comparable import differing_settings, labels, why_incomparable
from crossframe.verdict.diagnosis import (
    Diagnosis,
    diagnose,
    diagnose_batches,
    follows_optimizer,
    needs_full_tensors,
)
from crossframe.verdict.diagnosis.stated import MOMENTS, rule_of
from crossframe.verdict.dims import in_one_order
from crossframe.verdict.direction import GAIN, TANH, Directions, Found
from crossframe.verdict.envelope import ENOUGH, Envelope, decisive
from crossframe.verdict.islands import Island, island_at
from crossframe.verdict.judge import Judgement, judge
from crossframe.verdict.kinds import Verdict
from crossframe.verdict.locate import Divergence, locate, locate_sketch, ranks_off
from crossframe.verdict.pair import Pair
from crossframe.verdict.quantities import ACTIVATION, Quantity
from crossframe.verdict.start import other_start, parted_replica
from crossframe.verdict.unseen import unseen
from crossframe.verdict.walk import walk
from crossframe.verdict.words import NOUNS, in_words, other_dtype


@dataclass(frozen=True)
class Judged:
    """What became of a group of quantities, the same thing on several ranks: that of the worst.

    Attributes:
        name: parameter, "input of MODULE", "exp_avg of PARAMETER"; "" of a loss and of a norm.
        difference: relative.
        used: how much of what rounding may reach it is; more than 1 is outside. None where nothing is known of that; inf where
            bits are asked for, and differ.
    """

    step: int
    phase: str
    event: str
    unit: str
    name: str
    difference: float
    used: float | None
    beyond: bool
    equal: bool


@dataclass(frozen=True)
class PairVerdict:
    """What a comparison found.

    Attributes:
        a, b: what the recordings are called (`labels`).
        world_size: of both, or (of a, of b) where they differ.
        steps: how many steps were compared.
        max_relative_loss_difference: over steps and ranks; inf where only one side is finite; None if not compared.
        max_relative_parameter_difference: over recorded steps and parameters, without `zero_gradient_parameters`.
        zero_gradient_parameters: what differs for no reason (`crossframe.verdict.zero_gradient`).
        first_divergence: the first quantity outside its bound, None where there is none.
        reason: the verdict's ground, in a sentence.
        loss_differences: the largest over ranks, a step.
        parameter_differences: (step, the largest over parameters), a recorded step.
        envelope_used: how much of what twins allow was used up where it was most; more than 1 is outside. None without twins.
        judged_share: which part of all updated elements could be judged (`crossframe.verdict.envelope`). None without twins.
        judged: everything that was compared, causes first.
        diagnosis: what the first divergence looks like; None where nothing known does.
        settings: what the two state differently (`crossframe.verdict.comparable.differing_settings`), a sentence each.
        notes: what else is not alike and makes no difference: samples in another order, gradients recorded before clipping and
            after it; a sentence each.
        parted: the judgement of the quantity that `first_divergence` is in.
        directions: tests of direction inside the spread of perturbed runs; None where there were none.
        bits: what the first quantity that differs in bits says, or why bits are no evidence, in a clause; None where all bits are
            equal.
    """

    a: str
    b: str
    dtype: str
    world_size: int | tuple[int, int]
    steps: int
    verdict: Verdict
    reason: str
    max_relative_loss_difference: float | None = None
    max_relative_parameter_difference: float | None = None
    zero_gradient_parameters: tuple[str, ...] = ()
    first_divergence: Divergence | None = None
    loss_differences: tuple[float, ...] = field(default=(), repr=False)
    parameter_differences: tuple[tuple[int, float], ...] = field(default=(), repr=False)
    envelope_used: float | None = None
    judged_share: float | None = None
    judged: tuple[Judged, ...] = field(default=(), repr=False)
    diagnosis: Diagnosis | None = None
    settings: tuple[str, ...] = ()
    parted: Judged | None = field(default=None, repr=False)
    directions: Directions | None = field(default=None, repr=False)
    bits: str | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict:
        """The verdict as a JSON object. A difference that is not finite, or was not taken, is null."""
        worlds = self.world_size
        return {
            "a": self.a,
            "b": self.b,
            "dtype": self.dtype,
            "world_size": worlds if isinstance(worlds, int) else list(worlds),
            "steps": self.steps,
            "verdict": self.verdict.value,
            "max_relative_loss_difference": _number(self.max_relative_loss_difference),
            "max_relative_parameter_difference": _number(self.max_relative_parameter_difference),
            "zero_gradient_parameters": list(self.zero_gradient_parameters),
            "first_divergence": self.first_divergence.to_json() if self.first_divergence else None,
            "diagnosis": self.diagnosis.to_json() if self.diagnosis else None,
            "settings": list(self.settings),
            "bits": self.bits,
            "power": self.directions.to_json() if self.directions else None,
            "notes": list(self.notes),
            "reason": self.reason,
        }


def compare(a: Recording, b: Recording, *, sketched: bool = False, repeats: Sequence[Recording] = ()) -> PairVerdict:
    """Say whether two recordings agree, and if not, where they first differ.

    `crossframe.verdict.bounds` states what counts as agreement. In float64 a difference beyond its bound is a bug. In other
    dtypes it is one only before the first update, after which an optimizer may have amplified rounding; later, and in dtypes too
    coarse for a bound, the verdict is inconclusive. So it is if a difference uses more than `NEAR` of a bound coarser than
    float64's. A float64 run that computes a part in float32 is judged by float32's bounds from there on
    (`crossframe.verdict.islands`).

    Initial parameters must be equal bit for bit: unrelated values are another run (`crossframe.verdict.start`). What a rank
    gathers must be what the shards hold, unless both runs changed parameters between steps. NaN or infinity on one side alone is
    a bug in every dtype. Settings that differ make two runs incomparable only if they may cause the first difference
    (`crossframe.verdict.comparable`).

    If a recording has perturbed runs ("twins"), bounds are measured on these instead, in every dtype: see
    `crossframe.verdict.envelope`.

    If both are known to be of the same deterministic program, a difference within bounds is a different computation and not
    rounding: see `crossframe.verdict.bits`. It is located at the first quantity that differs in bits.

    Args:
        sketched: judge everything large by its sketch, also where its elements were recorded.
        repeats: other recordings of either run, made by the same command: they show what is not deterministic.

    Raises:
        RecordingError: tensors that are damaged, or that should be there and are not; a repeat of another run.
    """
    a, b = in_one_order(a, b)
    worlds = (a.manifest.world_size, b.manifest.world_size)
    world_size = worlds[0] if worlds[0] == worlds[1] else worlds
    names, dtype, steps = labels(a, b), a.manifest.dtype, min(a.num_steps, b.num_steps)
    settings = differing_settings(a, b)
    if rule_of(a) is not None and rule_of(a) == rule_of(b):  # whatever the classes are called
        settings = tuple(setting for setting in settings if setting.name != "optimizer")
    stated = tuple(setting.in_words(names) for setting in settings)
    if reason := why_incomparable(a, b):
        reason, found = "; ".join((*stated, reason)), diagnose_batches(a, b)
        return PairVerdict(
            *names, dtype, world_size, steps, Verdict.INCOMPARABLE, reason, diagnosis=found, settings=stated
        )
    pair = Pair(a, b, sketched=sketched)
    envelope = Envelope.of(pair)
    pair.noise = envelope.noise if envelope else ()
    findings = _Findings()
    island = None
    for group in walk(pair):
        if envelope:
            findings.add(_caused(pair, envelope.judge(group)), group)
            continue
        if island is None and (island := island_at(group, dtype)) is not None:
            pair.rounds_in = island.dtype
        findings.add([judge(island.judged(quantity) if island else quantity) for quantity in group], group)
    first = findings.first
    bits = bits_of(pair, findings.in_bits.quantity, repeats) if findings.in_bits else None
    where = diagnosis = None
    if first is not None:
        where = locate_sketch(first, pair) if first.quantity.sketched else locate(first, b.manifest)
        where = replace(where, ranks=ranks_off(findings.group, b.manifest))
        # Of other steps there are losses alone, and one number is always some multiple of another.
        if where.step in pair.steps:
            diagnosis = diagnose(pair, first, where, envelope.limit if envelope else _known_beforehand)
    if where is not None and where.phase == PARAMETERS and diagnosis is None and (said := _started_apart(pair)):
        verdict, reason = said
    elif envelope:
        verdict, reason = _conclude_by_envelope(pair, findings, where, envelope)
    else:
        verdict, reason = _conclude(pair, findings, where, island)
    directions = envelope.directions(dtype) if envelope and verdict in _UNDECIDED else None
    for found in (
        _by_bits(pair, findings, bits, verdict, names),
        _by_cause(pair, findings, bits, verdict, names),
        _by_direction(pair, findings, directions, envelope, where, names),
    ):
        if found is not None:
            first, where, diagnosis = found.first, found.where, found.diagnosis or diagnosis
            verdict, reason = found.verdict, f"{found.said}; {reason}"
            break
    if diagnosis is not None and where is not None and where.phase in (STATE, UPDATE):
        # A known rule with one thing changed explains the numbers: a class of another name is not what differs.
        named = [each for each in settings if each.name == "optimizer" and not {each.a, each.b} <= set(MOMENTS)]
        settings = tuple(each for each in settings if each not in named)
    if where is not None and (causes := [each.in_words(names) for each in settings if each.explains(where)]):
        # What the numbers look like is then no diagnosis of their own.
        verdict, reason, diagnosis = Verdict.INCOMPARABLE, f"{'; '.join(causes)}; of the numbers, {reason}", None
    elif first is not None and diagnosis is None and (hint := needs_full_tensors(first)):
        reason = f"{reason}; {hint}"
    if first is not None and findings.other_dtype is not None:
        reason = f"{reason}; ahead of it {other_dtype(findings.other_dtype, names)}"
    return PairVerdict(
        *names,
        dtype,
        world_size,
        steps,
        verdict,
        reason,
        max_relative_loss_difference=max(findings.losses),
        max_relative_parameter_difference=max(findings.parameters.values(), default=0.0),
        zero_gradient_parameters=tuple(dict.fromkeys((*pair.zero_gradient, *pair.noise))),
        first_divergence=where,
        loss_differences=tuple(findings.losses),
        parameter_differences=tuple(findings.parameters.items()),
        envelope_used=max(findings.used_before, first.used if first else 0.0) if envelope else None,
        judged_share=envelope.judged_share if envelope else None,
        judged=tuple(findings.judged),
        diagnosis=diagnosis,
        settings=stated,
        parted=findings.judged_as(first),
        bits=bits and _said_of_bits(bits, findings),
        directions=directions,
        notes=tuple(_notes(pair, names)),
    )


def _notes(pair: Pair, names: tuple[str, str]) -> Iterator[str]:
    """What is not alike and makes no difference."""
    optimizers = [recording.manifest.settings.get("optimizer") for recording in (pair.a, pair.b)]
    if (
        None not in optimizers
        and optimizers[0] != optimizers[1]
        and (rule := rule_of(pair.a)) == rule_of(pair.b)
        and rule
    ):
        said = " and ".join(f"{optimizer} in {name}" for optimizer, name in zip(optimizers, names, strict=True))
        yield f"the optimizer is called {said}; both follow the rule of {rule}"
    if (step := next((step for step in range(pair.num_steps) if pair.reordered(step)), None)) is not None:
        yield f"from step {step} on, ranks were fed the same samples in another order; activations are matched by sample"
    for step in pair.steps:
        if (clipped := clipped_on_one_side(pair, step)) is not None:
            yield clipped.in_words(names, step)
            return


@dataclass(frozen=True)
class _ByBits:
    """What equal and different bits change of a verdict."""

    verdict: Verdict
    first: Judgement
    where: Divergence
    diagnosis: Diagnosis | None
    said: str


def _by_bits(
    pair: Pair, findings: "_Findings", bits: Bits | None, verdict: Verdict, names: tuple[str, str]
) -> _ByBits | None:
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
        f"a different computation took place: at step {q.step} the {_called(first)} differs by {first.difference:.1e} between "
        f"{names[0]} and {names[1]}, {size}, but both are of the same program, and everything before it is equal in every bit"
    )
    if bits.compiled:
        said = f"{said} (compiled as a whole, so that the change may lie elsewhere in the step)"
    if not bits.repeated:
        said = f"{said}. If it may be nondeterministic, record either run again and pass that recording with --repeat"
    return _ByBits(Verdict.BUG if verdict is Verdict.BUG else Verdict.DIFFERENT, first, where, diagnosis, said)


_UNDECIDED = (Verdict.ROUNDING, Verdict.INCONCLUSIVE)
# What a hypothesis repeats operation by operation, so that it explains a difference whatever program it is found in.
_REPEATED = frozenset(
    {"norm_epsilon", "tanh_gelu", "low_precision_reduction", "missing_rank", "tied_weight", "dropout"}
)


def _caused(pair: Pair, judged: list[Judgement]) -> list[Judgement]:
    """Judgements in which moments and updates that follow the optimizer's rule on both sides are not outside.

    Each follows from its own gradients or moments, which were inside: squares and ratios amplify what rounding left of them.
    """
    outside = [each for each in judged if each.beyond and not each.one_sided and each.quantity.phase in (STATE, UPDATE)]
    if not outside or not all(follows_optimizer(pair, each.quantity) for each in outside):
        return judged
    inside = {
        id(each): replace(each, beyond=False, difference=min(each.difference, each.quantity.bound or 0.0))
        for each in outside
    }
    return [inside.get(id(each), each) for each in judged]


def _by_cause(
    pair: Pair, findings: "_Findings", bits: Bits | None, verdict: Verdict, names: tuple[str, str]
) -> _ByBits | None:
    """A bug where the first quantity that differs in bits is what a hypothesis predicts, operation by operation, from causes that
    are equal in every bit. That holds between other wrappers and layouts too; None otherwise."""
    first = findings.in_bits
    if bits is None or bits.repetition or verdict not in _UNDECIDED or first is None or first.quantity.bound is None:
        return None
    if not pair.same_world or first.quantity.step not in pair.steps or first.quantity.numel < _LEAST_ELEMENTS:
        return None
    if pair.a.manifest.framework != pair.b.manifest.framework or other_operator(pair, first.quantity) is not None:
        return None  # another framework's operator, or another kernel, rounds at other places
    where = locate_sketch(first, pair) if first.quantity.sketched else _located_in_bits(first, pair)
    diagnosis = diagnose(pair, first, where, _few_roundings)
    if diagnosis is None or diagnosis.signature not in _REPEATED:
        return None
    said = (
        f"at step {where.step} the {_called(first)} differs by {first.difference:.1e} between {names[0]} and {names[1]}, a size "
        f"that rounding also has, but everything before it is equal in every bit, and {diagnosis.evidence.rstrip('.')}"
    )
    return _ByBits(Verdict.BUG, first, where, diagnosis, said)


_LEAST_ELEMENTS = 16
"""A hypothesis that explains half of the difference of so many elements does not do so by chance."""


def _located_in_bits(judgement: Judgement, pair: Pair) -> Divergence:
    return locate(replace(judgement, quantity=replace(judgement.quantity, bound=None)), pair.b.manifest)


def _by_direction(
    pair: Pair,
    findings: "_Findings",
    directions: Directions | None,
    envelope: Envelope | None,
    where: Divergence | None,
    names: tuple[str, str],
) -> _ByBits | None:
    """A bug where a difference inside the spread of perturbed runs has a direction, before anything is outside of it."""
    if directions is None or envelope is None or (found := directions.found) is None:
        return None
    if where is not None and where.step < found.stop - 1:
        return None
    judgement = replace(judge(found.quantity), beyond=True)
    said = found.in_words(names)
    if (apart := findings.in_bits) is not None and _is_cause(pair, apart.quantity, found):
        # Of the same step, and with causes equal in every bit: what has a direction is its consequence.
        judgement, said = apart, f"{said}; in bits the first difference is {_called(apart)}"
    at = locate_sketch(judgement, pair)
    diagnosis = diagnose(pair, judgement, at, envelope.limit) if at.step in pair.steps else None
    if found.direction == GAIN and diagnosis is None:
        diagnosis = Diagnosis("norm_epsilon", f"{said}, as with another epsilon.")
    if found.direction == TANH:
        diagnosis = Diagnosis("tanh_gelu", f"{said}.")
    return _ByBits(Verdict.BUG, judgement, at, diagnosis, said)


def _is_cause(pair: Pair, first: Quantity, found: Found) -> bool:
    """Whether the first quantity that differs in bits is where a direction begins: in the step that shows it, and not for another
    kernel or framework."""
    same = pair.a.manifest.framework == pair.b.manifest.framework and pair.same_world
    return same and first.bound is not None and first.step == found.stop - 1 and other_operator(pair, first) is None


def _said_of_bits(bits: Bits, findings: "_Findings") -> str:
    """What equal and different bits say, in a clause."""
    first = f"the first difference in bits is {_called(findings.in_bits)} at step {findings.in_bits.quantity.step}"  # type: ignore[union-attr]
    return f"{first}; not used as evidence: {bits.why_not}" if bits.why_not else first


def _called(judgement: Judgement | None) -> str:
    """The name of what was judged."""
    assert judgement is not None
    q = judgement.quantity
    rank = f" of rank {q.rank}" if q.rank is not None else ""
    if q.kind == ACTIVATION or not q.name:
        return f"{q.name or q.event}{rank}"
    return f"{NOUNS[q.phase]} ({q.name}){rank}"


def _few_roundings(quantity: Quantity) -> float:
    """How far the results of a few operations on the same bits may lie apart: a unit in the last place of each element."""
    return 2 * max(unit_roundoff(dtype) for dtype in quantity.dtypes) * max(quantity.norms)


def _known_beforehand(quantity: Quantity) -> float:
    """The largest distance that rounding may reach there, without twins."""
    return (quantity.bound or 0.0) * quantity.scale


# Rounding that training amplifies grows from one recorded step to the next by a factor: about 100 in five steps was seen for
# a GPT at a learning rate too high for it. A bug is there at once: what it touches is off by many orders of magnitude
# more than all that came before. The border lies between the two.
JUMP = 1000.0
NEAR = 0.1
"""The share of a coarse bound, one not measured on perturbed runs, above which the verdict is inconclusive."""


class _Findings:
    """What the walk has met so far."""

    def __init__(self) -> None:
        self.equal = True
        self.first: Judgement | None = None
        # The same thing on all ranks, where it was first outside.
        self.group: list[Judgement] = []
        # The first quantity that differs in bits.
        self.in_bits: Judgement | None = None
        # How much of its bound any quantity before the first one outside had used up.
        self.used_before = 0.0
        # The most that any quantity outside uses.
        self.most_beyond = 0.0
        self.not_finite: Judgement | None = None
        # The first activation that has another dtype in either, up to the first quantity outside.
        self.other_dtype: Quantity | None = None
        self.losses: list[float] = []
        self.parameters: dict[int, float] = {}
        self.judged: list[Judged] = []
        self._at_first = self._at_bits = 0

    def judged_as(self, judgement: Judgement | None) -> Judged | None:
        """The entry of `judged` that a first judgement is in."""
        if judgement is None:
            return None
        if judgement is self.first:
            return self.judged[self._at_first]
        if judgement is self.in_bits:
            return self.judged[self._at_bits]
        q = judgement.quantity
        same = (one for one in self.judged if (one.step, one.phase, one.name) == (q.step, q.phase, q.name))
        return next(same, None)

    def add(self, group: list[Judgement], quantities: list[Quantity]) -> None:
        """Take in a group of judgements.

        Args:
            quantities: what was judged, with all elements.
        """
        worst = max(group, key=lambda judgement: (judgement.beyond, judgement.difference))
        q = worst.quantity
        phase, step = q.phase, q.step
        known = q.bound != math.inf or worst.one_sided
        used = worst.used if known else None
        equal = all(judgement.equal for judgement in group)
        self.judged.append(Judged(step, phase, q.event, q.unit, q.name, worst.difference, used, worst.beyond, equal))
        if self.in_bits is None and not equal:
            both = zip(group, quantities, strict=True)
            apart = [
                replace(judged, quantity=replace(q, bound=judged.quantity.bound))
                for judged, q in both
                if not judged.equal
            ]
            self._at_bits = len(self.judged) - 1
            self.in_bits = max(apart, key=lambda judgement: (judgement.beyond, judgement.whole))
        self.equal = self.equal and equal
        if worst.beyond:
            self.most_beyond = max(self.most_beyond, *(judgement.used for judgement in group if judgement.beyond), 0.0)
        if self.first is None:
            if self.other_dtype is None and q.kind == ACTIVATION and q.dtypes[0] != q.dtypes[1]:
                self.other_dtype = q
            if worst.beyond:
                self.first, self._at_first, self.group = worst, len(self.judged) - 1, group
            else:
                self.used_before = max(self.used_before, *(judgement.used for judgement in group))
        if self.not_finite is None:
            self.not_finite = next((judgement for judgement in group if judgement.both_not_finite), None)
        if q.kind == FORWARD:
            self.losses.append(worst.difference)
        elif phase == UPDATE:
            # A zero-gradient parameter, bounded by inf, says nothing unless it is not finite on one side.
            apart = max(judgement.whole for judgement in group)
            self.parameters[step] = max(self.parameters.get(step, 0.0), apart if known else 0.0)


def _conclude(pair: Pair, findings: _Findings, where: Divergence | None, island: Island | None) -> tuple[Verdict, str]:
    """The verdict and its reason, without twins."""
    verdict, reason = _conclude_by_bounds(pair, findings, where, island)
    return verdict, f"{reason}; {island.in_words()}" if island and not findings.equal else reason


def _conclude_by_bounds(
    pair: Pair, findings: _Findings, where: Divergence | None, island: Island | None
) -> tuple[Verdict, str]:
    first, bounds = findings.first, island.bounds if island else pair.bounds
    dtype = island.dtype if island else pair.a.manifest.dtype
    if first is not None and where is not None:
        said = in_words(first, where, labels(pair.a, pair.b), unseen=unseen(pair, where))
        if first.one_sided or first.quantity.bound is None:
            return Verdict.BUG, said
        if not bounds.decisive:
            return Verdict.INCONCLUSIVE, f"{said}, but {dtype} is too coarse for a bound: {_settle(pair)}"
        if where.step == 0 and where.phase != UPDATE:
            return Verdict.BUG, said
        if dtype == "float64":
            if first.used > JUMP * findings.used_before:
                return Verdict.BUG, said
            grown = f"it grew up to there by less than {JUMP:g} times at once, as rounding does that training amplifies"
            return Verdict.INCONCLUSIVE, f"{said}, but {grown}: compare fewer steps, or lower the learning rate"
        return (
            Verdict.INCONCLUSIVE,
            f"{said}, but in {dtype} the optimizer may have amplified rounding by then: {_settle(pair)}",
        )
    also = ""
    if (judgement := findings.not_finite) is not None:
        q = judgement.quantity
        also = f"from step {q.step} on ({q.phase} {q.name!r}) both sides hold NaN or infinity"
    if findings.equal:
        return Verdict.EQUAL, "every bit that was compared is equal" + (f"; {also}" if also else "")
    if also:
        return Verdict.INCONCLUSIVE, f"{also}, where nothing can be compared: lower the learning rate"
    largest = max(findings.parameters.values(), default=0.0)
    said = f"losses differ by at most {max(findings.losses):.1e}, parameters by {largest:.1e}"
    if not bounds.decisive:
        return Verdict.INCONCLUSIVE, f"{said}, but {dtype} is too coarse for a bound: {_settle(pair)}"
    said = f"{said}; rounding may reach {bounds.loss:.1e} and {bounds.parameter:.1e}"
    if dtype != "float64" and (near := [each for each in findings.judged if (each.used or 0.0) > NEAR]):
        most = max(near, key=lambda each: each.used or 0.0)
        what = f"the {most.name or most.event} at step {most.step} uses {most.used:.2f} of it"
        return Verdict.INCONCLUSIVE, (
            f"{said}, a coarse bound for {dtype}, within which a small bug may hide: {what}, and {len(near)} of "
            f"{len(findings.judged)} quantities more than {NEAR:g}; {_settle(pair)}"
        )
    return Verdict.ROUNDING, said


def _started_apart(pair: Pair) -> tuple[Verdict, str] | None:
    """The verdict on initial values that differ: a bug if copies within one recording do, else another run."""
    names = labels(pair.a, pair.b)
    for recording, label in zip((pair.a, pair.b), names, strict=True):
        if (found := parted_replica(recording)) is not None:
            replica, name = found
            mesh = recording.manifest.mesh
            ranks = mesh.shard_group(replica * mesh.shard)
            who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
            return Verdict.BUG, (
                f"{who} of {label} started from other values of {name!r} than rank 0: broadcast parameters from rank 0, or seed "
                "all ranks alike"
            )
    if apart := other_start(pair):
        total = sum(recorded.numel > 0 for recorded in pair.a.manifest.params.values())
        return Verdict.INCOMPARABLE, (
            f"the runs start from different values: {len(apart)} of {total} parameters, {apart[0]!r} the first, on all ranks "
            "alike; start both from one seed or one checkpoint"
        )
    return None


def _settle(pair: Pair, num_runs: int = 4) -> str:
    """What would tell, with so many perturbed runs."""
    for recording in (pair.a, pair.b):
        if isinstance(command := recording.manifest.settings.get(COMMAND), str):
            if command.startswith("crossframe record "):
                ours, dashes, of_script = command.partition(" -- ")
                keep = "--top-up" if ours.split()[2:3] and ours.split()[2].endswith(".py") else "--overwrite"
                again = f"`{ours} --output {recording.directory} {keep} --perturbed-runs {num_runs}{dashes}{of_script}`"
            else:
                first = 1 + len(recording.twins())
                again = (
                    f"`{command}`, started as it was, with CROSSFRAME_TWIN={first}, then {first + 1} to {num_runs} in its "
                    "environment,"
                )
            return f"measure what rounding does with {again} and compare again, or record both in float64"
    return (
        f"record one of both again with perturbed runs (--perturbed-runs {num_runs}), or both with --dtype float64, and compare "
        "those"
    )


def _conclude_by_envelope(
    pair: Pair, findings: _Findings, where: Divergence | None, envelope: Envelope
) -> tuple[Verdict, str]:
    """The verdict and its reason, where twins say how far rounding goes."""
    if findings.first is not None and where is not None:
        names, by = labels(pair.a, pair.b), envelope.in_words()
        said = in_words(findings.first, where, names, by=by, unseen=unseen(pair, where))
        near, enough = findings.most_beyond, decisive(envelope.num_runs)
        if findings.first.quantity.bound is not None and near <= enough:
            return Verdict.INCONCLUSIVE, (
                f"{said}; but nothing is more than {near:.2f} times what rounding may reach, and with {envelope.num_runs} "
                f"perturbed runs only {enough:.1f} times would be decisive: {_settle(pair, ENOUGH)}"
            )
        return Verdict.BUG, said
    if findings.equal:
        return Verdict.EQUAL, "every bit that was compared is equal"
    if (judgement := findings.not_finite) is not None:
        q = judgement.quantity
        said = f"from step {q.step} on ({q.phase} {q.name!r}) both sides hold NaN or infinity, where nothing can be compared"
        return Verdict.INCONCLUSIVE, f"{said}: lower the learning rate"
    said = (
        f"everything lies as near as {envelope.in_words()} do to one another: at most {findings.used_before:.2f} of what "
        f"rounding may reach ({100 * envelope.judged_share:.0f} % of what was updated had gradients large enough to be judged)"
    )
    if (step := envelope.saturated_from) is not None:
        chaos = f"but from step {step} on the twins' gradients have nothing in common, and a bug would not show"
        return Verdict.INCONCLUSIVE, f"{said}, {chaos}: compare fewer steps (--steps {max(step, 1)}), or in float64"
    return Verdict.ROUNDING, said


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
