"""Two recordings in, a verdict out: the order in which the parts of a comparison are asked."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from crossframe.dtypes import coarser
from crossframe.recording import Recording
from crossframe.recording.lines import PARAMETERS, STATE, UPDATE
from crossframe.verdict.bits import bits_of
from crossframe.verdict.conclude import conclude_by_bounds, conclude_by_envelope, started_apart
from crossframe.verdict.diagnosis import diagnose, diagnose_batches, follows_optimizer, needs_full_tensors
from crossframe.verdict.diagnosis.stated import MOMENTS, rule_of
from crossframe.verdict.dims import in_one_order
from crossframe.verdict.envelope import Envelope
from crossframe.verdict.evidence import UNDECIDED, bits_in_words, by_bits, by_cause, by_direction
from crossframe.verdict.findings import Findings
from crossframe.verdict.islands import island_at
from crossframe.verdict.kinds import Verdict
from crossframe.verdict.measure.clipping import clipped_on_one_side
from crossframe.verdict.measure.comparable import differing_settings, labels, why_incomparable
from crossframe.verdict.measure.judge import Judgement, judge
from crossframe.verdict.measure.locate import locate, locate_sketch, ranks_off
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.measure.quantities import Quantity
from crossframe.verdict.measure.walk import walk
from crossframe.verdict.precision import precisions_in_words
from crossframe.verdict.result import PairVerdict
from crossframe.verdict.words import other_dtype


def compare(a: Recording, b: Recording, *, sketched: bool = False, repeats: Sequence[Recording] = ()) -> PairVerdict:
    """Say whether two recordings agree, and if not, where they first differ.

    `crossframe.verdict.measure.bounds` states what counts as agreement. In float64 a difference beyond its bound is a bug. In
    other dtypes it is one only before the first update, after which an optimizer may have amplified rounding; later, and in
    dtypes too coarse for a bound, the verdict is inconclusive. So it is if a difference uses more than `NEAR` of a bound coarser
    than float64's. A float64 run that computes a part in float32 is judged by float32's bounds from there on
    (`crossframe.verdict.islands`).

    Initial parameters must be equal bit for bit: unrelated values are another run (`crossframe.verdict.start`). What a rank
    gathers must be what the shards hold, unless both runs changed parameters between steps. NaN or infinity on one side alone is
    a bug in every dtype. Settings that differ make two runs incomparable only if they may cause the first difference
    (`crossframe.verdict.measure.comparable`), or if the numbers leave the question open.

    If the two compute or store parameters in different dtypes, the coarser one sets the bounds, and only its own perturbed runs
    measure them: see `crossframe.verdict.precision`.

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
    names, dtype, steps = labels(a, b), coarser(a.manifest.dtype, b.manifest.dtype), min(a.num_steps, b.num_steps)
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
    dtype = pair.dtype
    envelope = Envelope.of(pair)
    pair.noise = envelope.noise if envelope else ()
    findings = Findings()
    island = None
    for group in walk(pair):
        if envelope:
            findings.add(_caused(pair, envelope.judge(group)), group)
            continue
        if island is None and pair.coarser is None and (island := island_at(group, dtype)) is not None:
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
    if where is not None and where.phase == PARAMETERS and diagnosis is None and (said := started_apart(pair)):
        verdict, reason = said
    elif envelope:
        verdict, reason = conclude_by_envelope(pair, findings, where, envelope)
    else:
        verdict, reason = conclude_by_bounds(pair, findings, where, island)
    directions = envelope.directions(dtype) if envelope and verdict in UNDECIDED else None
    for found in (
        by_bits(pair, findings, bits, verdict, names),
        by_cause(pair, findings, bits, verdict, names),
        by_direction(pair, findings, directions, envelope, where, names),
    ):
        if found is not None:
            first, where, diagnosis = found.first, found.where, found.diagnosis or diagnosis
            verdict, reason = found.verdict, f"{found.said}; {reason}"
            break
    if diagnosis is not None and where is not None and where.phase in (STATE, UPDATE):
        # A known rule with one thing changed explains the numbers: a class of another name is not what differs.
        named = [each for each in settings if each.name == "optimizer" and not {each.a, each.b} <= set(MOMENTS)]
        settings = tuple(each for each in settings if each not in named)
    if where is None:
        acting = [each for each in settings if verdict is Verdict.INCONCLUSIVE and each.acts_in is not None]
    else:
        acting = [each for each in settings if each.explains(where)]
    if causes := [each.in_words(names) for each in acting]:
        # What the numbers look like is then no diagnosis of their own.
        verdict, reason, diagnosis = Verdict.INCOMPARABLE, f"{'; '.join(causes)}; of the numbers, {reason}", None
    elif first is not None and diagnosis is None and (hint := needs_full_tensors(first)):
        reason = f"{reason}; {hint}"
    if pair.coarser is not None:
        reason = f"{reason}; {precisions_in_words(pair, names)}: {_IMPLIED[verdict].format(dtype)}"
    elif first is not None and findings.other_dtype is not None:
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
        bits=bits and bits_in_words(bits, findings),
        directions=directions,
        notes=tuple(_notes(pair, names)),
    )


_IMPLIED = {
    Verdict.EQUAL: "what was compared does not show it",
    Verdict.ROUNDING: "they differ as the rounding of {} implies",
    Verdict.BUG: "they differ by more than the rounding of {} implies, or otherwise",
    Verdict.DIFFERENT: "they differ by more than the rounding of {} implies, or otherwise",
    Verdict.INCONCLUSIVE: "whether the rounding of {} implies all of it is not known",
    Verdict.INCOMPARABLE: "the rounding of {} is no reason not to compare them",
}


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


def _known_beforehand(quantity: Quantity) -> float:
    """The largest distance that rounding may reach there, without perturbed runs."""
    return (quantity.bound or 0.0) * quantity.scale


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
