"""`compare`: the verdict on two recordings."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from crossframe.dtypes import coarser
from crossframe.param_map import ParamMap
from crossframe.recording import Recording, common_steps
from crossframe.recording.event_format import BACKWARD, FORWARD, INPUT, NORM, PARAMETERS, REDUCE, STATE, UPDATE
from crossframe.recording.known_settings import EPS_HAT
from crossframe.verdict.activation_dims import in_one_order
from crossframe.verdict.bits import bits_of, is_repetition
from crossframe.verdict.call_orders import match_calls
from crossframe.verdict.conclude import conclude_by_bounds, conclude_by_limits, conclude_initial_values
from crossframe.verdict.diagnosis import (
    Diagnosis,
    diagnose,
    diagnose_batches,
    diagnose_untied,
    follows_optimizer,
    needs_full_tensors,
)
from crossframe.verdict.diagnosis.stated_optimizer import MOMENTS, rule_of
from crossframe.verdict.divergence_text import NOUNS, other_dtype
from crossframe.verdict.environments import environments_of
from crossframe.verdict.evidence import (
    UNDECIDED,
    describe_bits,
    earlier_bits,
    evidence_from_bits,
    evidence_from_cause,
    evidence_from_direction,
    rounded_otherwise,
)
from crossframe.verdict.measure.causal_order import walk
from crossframe.verdict.measure.comparable import (
    BATCH,
    Setting,
    differing_batches,
    differing_settings,
    labels,
    why_incomparable,
)
from crossframe.verdict.measure.judge import Judgement, judge
from crossframe.verdict.measure.locate import Divergence, locate, locate_sketch, ranks_off
from crossframe.verdict.measure.narrower_dtypes import narrower_dtype_at
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.measure.quantities import Quantity
from crossframe.verdict.measure.sample_ranks import can_be_joined, is_by_rank
from crossframe.verdict.measure.unequal_dtypes import describe_precisions
from crossframe.verdict.model_ranks import model_ranks_differ
from crossframe.verdict.need_not_agree import has_loss_alone, need_not_agree
from crossframe.verdict.notes import notes_of
from crossframe.verdict.one_naming import OneNaming, in_one_naming
from crossframe.verdict.perturbed_runs.limits import Limits
from crossframe.verdict.result import PairVerdict
from crossframe.verdict.unlike_activations import UnlikeActivations
from crossframe.verdict.unrecorded_causes import unseen
from crossframe.verdict.verdicts import Verdict

_SAME_SAMPLES = 1e-3
"""Gradients of other samples differ by more of their norm, unless a thousand others are the same. What a recorder takes for
samples may come in several steps, such as the two rows of the edges of a graph."""


def compare(
    a: Recording,
    b: Recording,
    *,
    sketched: bool = False,
    repeats: Sequence[Recording] = (),
    param_map: ParamMap | None = None,
    bitwise: bool | None = None,
) -> PairVerdict:
    """Decide whether two recordings agree, and if not, where they first differ.

    If their parameters have different names, these are matched by `param_map`, or else by their initial values, and modules by
    their parameters and by the values of their inputs and outputs (`crossframe.verdict.one_naming`).

    `crossframe.verdict.measure.bounds_by_dtype` defines agreement. In float64, a difference beyond its bound is a bug. In other
    dtypes it is a bug only before the first update, because an optimizer can amplify rounding. After the first update, in
    dtypes too coarse for a bound, and where a difference uses more than `NEAR` of a bound coarser than float64's, the verdict
    is inconclusive. If a float64 run computes a part in float32, float32's bounds apply from there on
    (`crossframe.verdict.measure.narrower_dtypes`).

    Initial parameters must be bitwise equal; unrelated values mean another run (`crossframe.verdict.initial_values`). A gathered
    parameter must equal its shards, unless both runs changed parameters between steps, or one of them by rounding. NaN or
    infinity on one side only is a bug in every dtype. Differing settings make two runs incomparable only if they can cause the
    first difference (`crossframe.verdict.measure.comparable`) or if the numbers are inconclusive. Learning rates of steps are no
    numbers of a run: if they differ, differences within bounds are not rounding.

    If the runs compute or store parameters in different dtypes, the coarser dtype sets the bounds, and only perturbed runs of the
    coarser run are used (`crossframe.verdict.measure.unequal_dtypes`).

    If a recording has perturbed runs, they measure the bounds in every dtype (`crossframe.verdict.perturbed_runs.limits`).

    Between two implementations, the rows of an expert's activations are compared in one order
    (`crossframe.verdict.measure.routed_rows`), and an output that is the other side's after an elementwise activation, such as
    that of a norm that applies a ReLU itself, is not compared if what follows agrees.

    Buffers, such as running means, are compared after each step (`crossframe.verdict.measure.buffers`).

    Activations outside their bounds are no bug if they differ only in rows from which nothing follows
    (`crossframe.verdict.unused_rows`), or if they are not the same value in two implementations
    (`crossframe.verdict.unlike_activations`). Calls of a module are compared in the order of their inputs if no bug follows
    (`crossframe.verdict.call_orders`). Losses and local gradients that differ are no bug if the optimizers get other gradients
    (`crossframe.verdict.measure.replaced_gradients`), the recorders have added other numbers of them in a step, and all else
    agrees. Neither are they where a script updates its parameters by itself, if the updates agree.

    Differences of the environments are listed, and do not decide (`crossframe.verdict.environments`).

    If both recordings are known to be of the same deterministic program, a difference within bounds is a different computation,
    not rounding (`crossframe.verdict.bits`). It is located at the first quantity that differs in bits. If that differs by a few
    roundings, it is rounding (`crossframe.verdict.evidence`).

    Args:
        sketched: compare sketches of large tensors even if their elements were recorded.
        repeats: further recordings of either run, made by the same command; they reveal nondeterminism.
        param_map: the names of one recording, and as paths those of the other one; None: derived if they differ.
        bitwise: whether a difference within bounds between two runs of the same program is a different computation. None: if it
            begins with more than a few roundings. False: it is rounding, as between two programs.

    Raises:
        MappingError: the map does not fit the recordings.
        RecordingError: damaged or missing tensors, or a repeat of another run.
    """
    naming = in_one_naming(a, b, param_map)
    a, b = in_one_order(naming.a, naming.b)
    is_golden = b.golden is not None  # whose spread has its own names
    if (calls := match_calls(b, a) if is_golden else match_calls(a, b)) is None:
        return _compare(a, b, naming, sketched, repeats, bitwise)
    sides = (calls.view(a), b) if is_golden else (a, calls.view(b))
    renamed = a if is_golden else b
    views = [calls.view(repeat) if is_repetition(repeat, renamed) else repeat for repeat in repeats]
    found = _compare(*sides, naming, sketched, views, bitwise)
    where = found.first_divergence
    if found.verdict is not Verdict.INCOMPARABLE and (where is None or where.phase != FORWARD):
        return replace(found, notes=(*found.notes, f"{calls.text}: calls with the same inputs are compared"))
    by_number = _compare(a, b, naming, sketched, repeats, bitwise)
    note = f"{calls.text}; if calls with the same inputs are compared, {found.reason}"
    return replace(by_number, notes=(*by_number.notes, note))


def _compare(
    a: Recording, b: Recording, naming: OneNaming, sketched: bool, repeats: Sequence[Recording], bitwise: bool | None
) -> PairVerdict:
    """`compare` of two recordings with the same names: of each rank, or of all together if they share a loss otherwise."""
    found = _compare_ranks(a, b, naming, sketched, repeats, bitwise)
    where = found.first_divergence
    if found.verdict is not Verdict.BUG or where is None:
        return found
    if where.phase in (FORWARD, BACKWARD, REDUCE, NORM):
        for left_out, note in need_not_agree(a, b, where, sketched):
            apart = _compare_ranks(a, b, naming, sketched, repeats, False, left_out=left_out)
            if apart.verdict in (Verdict.EQUAL, Verdict.ROUNDING):
                return replace(apart, verdict=Verdict.ROUNDING, notes=(*apart.notes, note))
    if (where.phase, where.event) != (FORWARD, "loss"):
        return found
    if a.manifest.world_size == 1 or not is_by_rank(a, b) or not can_be_joined(a, b, in_place=True):
        return found
    joined = _compare_ranks(a, b, naming, sketched, repeats, bitwise, by_rank=False)
    if joined.verdict not in (Verdict.EQUAL, Verdict.ROUNDING):
        return found
    note = "the losses of single ranks differ, but their means and the reduced gradients agree: ranks share the loss otherwise"
    return replace(joined, verdict=Verdict.ROUNDING, notes=(*joined.notes, note))


def _compare_ranks(
    a: Recording,
    b: Recording,
    naming: OneNaming,
    sketched: bool,
    repeats: Sequence[Recording],
    bitwise: bool | None,
    *,
    by_rank: bool = True,
    left_out: Collection[str] = (),
) -> PairVerdict:
    """Compare two recordings with the same names.

    Args:
        by_rank: whether ranks with the same samples are compared one by one.
        left_out: kinds of quantities that need not agree.
    """
    worlds = (a.manifest.world_size, b.manifest.world_size)
    world_size = worlds[0] if worlds[0] == worlds[1] else worlds
    names, dtype, steps = labels(a, b), coarser(a.manifest.dtype, b.manifest.dtype), len(common_steps(a, b))
    settings = differing_settings(a, b)
    if rule_of(a) is not None and rule_of(a) == rule_of(b):  # class names may differ
        settings = tuple(setting for setting in settings if setting.name != "optimizer")
    if naming.note:  # two implementations of one model, which have names of their own
        settings = tuple(setting for setting in settings if setting.name != "model")
    stated = tuple(setting.describe(names) for setting in settings)
    if reason := naming.problem or why_incomparable(a, b):
        reason, found = "; ".join((*stated, reason)), diagnose_untied(a, b) or diagnose_batches(a, b)
        return PairVerdict(
            *names,
            dtype,
            world_size,
            steps,
            Verdict.INCOMPARABLE,
            reason,
            diagnosis=found,
            settings=stated,
            environments=environments_of(a, b, Verdict.INCOMPARABLE, None, names),
        )
    if (batches := differing_batches(a, b)) is not None:
        settings, stated = (batches, *settings), (batches.describe(names), *stated)
    pair = Pair(a, b, sketched=sketched, by_rank=by_rank)
    dtype = pair.dtype
    limits = Limits.of(pair)
    pair.noise = limits.noise if limits else ()
    left_out = {*left_out, FORWARD} if has_loss_alone(a, b) else left_out
    collected = UnlikeActivations(pair)
    narrower = None
    apart, total = 0.0, 0.0
    for group in walk(pair):
        if limits:
            judged = _caused(pair, limits.judge(group))
        else:
            if narrower is None and pair.coarser is None and (narrower := narrower_dtype_at(group, dtype)) is not None:
                pair.rounds_in = narrower.dtype
            judged = [judge(narrower.judged(quantity) if narrower else quantity) for quantity in group]
        if batches is not None and group[0].kind == REDUCE and group[0].step >= batches.since:
            apart += sum((each.whole * each.quantity.scale) ** 2 for each in judged)
            total += sum(each.quantity.scale**2 for each in judged)
        if group[0].kind in left_out:
            judged = [replace(each, quantity=replace(each.quantity, bound=math.inf), beyond=False) for each in judged]
        collected.add(judged, group)
    collected.finish()
    if batches is not None and 0 < total < math.inf and apart <= _SAME_SAMPLES**2 * total:
        settings = (replace(batches, moved_samples=False), *settings[1:])
    findings, unused = collected.findings, collected.unused
    if (without_use := unused.describe()) is not None:
        findings.set_aside()
    first = findings.first
    bits = bits_of(pair, findings.in_bits.quantity, repeats) if findings.in_bits else None
    where = diagnosis = None
    if first is not None:
        where = locate_sketch(first, pair) if first.quantity.sketched else locate(first, b.manifest)
        where = replace(where, ranks=ranks_off(findings.group, b.manifest))
        # Other steps have only losses, and any number is a multiple of another.
        if where.step in pair.steps:
            diagnosis = diagnose(pair, first, where, limits.limit if limits else _known_beforehand)
    if (
        where is not None
        and where.phase == PARAMETERS
        and diagnosis is None
        and (text := conclude_initial_values(pair))
    ):
        verdict, reason = text
    elif limits:
        verdict, reason = conclude_by_limits(pair, findings, where, limits)
    else:
        verdict, reason = conclude_by_bounds(pair, findings, where, narrower)
    directions = limits.directions(dtype) if limits and verdict in UNDECIDED else None
    evidence = evidence_from_cause(pair, findings, bits, verdict, names)
    if evidence is None and (bitwise is not False or verdict is Verdict.BUG):
        strict = bitwise is True
        evidence = evidence_from_bits(pair, findings, bits, verdict, names, limits, strict=strict)
    evidence = evidence or evidence_from_direction(pair, findings, directions, limits, where, names)
    if evidence is not None:
        first, where, diagnosis = evidence.first, evidence.where, evidence.diagnosis or diagnosis
        verdict, reason = evidence.verdict, f"{evidence.reason}; {reason}"
    elif bitwise is not False and verdict is Verdict.BUG and (earlier := earlier_bits(findings, bits, names)):
        reason = f"{reason}; {earlier}"
    if (
        bitwise is None
        and verdict is Verdict.ROUNDING
        and (other := rounded_otherwise(pair, findings, bits, names, limits))
    ):
        reason = f"{reason}; {other}"
    if (found := model_ranks_differ(pair)) is not None:
        if verdict is Verdict.BUG and _before(where, found[0], b):
            reason = f"{reason}; then, {found[1]}"
        else:
            where, verdict, reason = found[0], Verdict.BUG, f"{found[1]}; from the first of them alone: {reason}"
            first = diagnosis = None
    if diagnosis is not None and where is not None and where.phase in (STATE, UPDATE):
        # A known rule with one change explains the numbers, so the class name is not the difference.
        named = [each for each in settings if each.name == "optimizer" and not {each.a, each.b} <= set(MOMENTS)]
        settings = tuple(each for each in settings if each not in named)
    if where is None:
        acting = [each for each in settings if _acts(each, verdict)]
    else:
        acting = [each for each in settings if each.explains(where)]
    if causes := [each.describe(names) for each in acting]:
        # Runs that start with the same learning rates were meant to be the same, so another schedule is a bug.
        scheduled = where is not None and all(each.scheduled for each in acting)
        verdict = Verdict.BUG if scheduled else Verdict.INCOMPARABLE
        reason = f"{'; '.join(causes)}; from the numbers alone: {reason}"
        if acting[0].name == BATCH:
            # The place is the batch, wherever the numbers first differ.
            where, diagnosis = None, diagnose_batches(a, b)
        else:
            diagnosis = _diagnosis_of(acting, diagnosis, names)
    elif first is not None and diagnosis is None and (hint := needs_full_tensors(first)):
        reason = f"{reason}; {hint}"
    if pair.coarser is not None:
        reason = f"{reason}; {describe_precisions(pair, names)}: {_IMPLIED[verdict].format(dtype)}"
    elif first is not None and pair.of_other_shapes:
        reason = f"{reason}; {next(iter(pair.of_other_shapes.values()))}"
    elif first is not None and findings.other_dtype is not None:
        reason = f"{reason}; before it, {other_dtype(findings.other_dtype, names)}"
    return PairVerdict(
        *names,
        dtype,
        world_size,
        steps,
        verdict,
        reason,
        max_relative_loss_difference=max(findings.losses),
        max_relative_parameter_difference=max(findings.parameters.values(), default=0.0),
        zero_gradient_parameters=tuple(dict.fromkeys((*pair.zero_gradient, *pair.noise, *_parts(pair)))),
        first_divergence=where,
        loss_differences=tuple(findings.losses),
        parameter_differences=tuple(findings.parameters.items()),
        limit_used=max(findings.used_before, first.used if first else 0.0) if limits else None,
        judged_share=limits.judged_share if limits else None,
        judged=tuple(findings.judged),
        diagnosis=diagnosis,
        settings=stated,
        parted=findings.entry_for(first),
        unrecorded=_unrecorded(pair, verdict, where),
        bits=bits and describe_bits(bits, findings),
        directions=directions,
        notes=(
            *filter(None, (naming.note, naming.unrecorded, without_use)),
            *notes_of(pair, names, own=not naming.note),
        ),
        environments=environments_of(a, b, verdict, where, names),
    )


def _parts(pair: Pair) -> list[str]:
    """Parameters of which some elements have a gradient that is only rounding, with their number."""
    others = [name for name in pair.names() if name not in pair.zero_gradient and name not in pair.noise]
    masks = ((name, pair.zero_gradient_elements(name)) for name in others)
    return [f"{name} ({mask.sum()} of {mask.size} elements)" for name, mask in masks if mask is not None]


def _unrecorded(pair: Pair, verdict: Verdict, where: Divergence | None) -> str | None:
    found = unseen(pair, where) if verdict is Verdict.DIFFERENT and where is not None else None
    return found.describe() if found is not None else None


_IMPLIED = {
    Verdict.EQUAL: "the compared values do not show this",
    Verdict.ROUNDING: "the rounding of {} explains the difference",
    Verdict.BUG: "the rounding of {} does not explain the difference",
    Verdict.DIFFERENT: "the rounding of {} does not explain the difference",
    Verdict.INCONCLUSIVE: "it is not known whether the rounding of {} explains the whole difference",
    Verdict.INCOMPARABLE: "the rounding of {} does not prevent a comparison",
}


def _before(where: Divergence | None, other: Divergence, recording: Recording) -> bool:
    """Whether a difference comes earlier in the causal order of steps, phases and activations than another."""
    return where is not None and _order(where, recording) < _order(other, recording)


def _order(where: Divergence, recording: Recording) -> tuple[int, int, int]:
    """The place in causal order: the batch is before all activations, and the loss after them."""
    activations = recording.activations(where.step) if where.phase == FORWARD else []
    uses = [(None, INPUT), *((module or None, use) for _, module, use in activations)]
    at = (where.module, where.event)
    return where.step, list(NOUNS).index(where.phase), uses.index(at) if at in uses else len(uses)


def _acts(setting: Setting, verdict: Verdict) -> bool:
    """Whether a setting changes values although the numbers show no place where it does.

    Another learning rate changes every update, and other samples every loss, so numbers within a bound then only say that the
    bound is too coarse to show it.
    """
    if setting.acts_in is None or setting.redistributed:
        return False
    return verdict is Verdict.INCONCLUSIVE or (
        verdict is Verdict.ROUNDING and (setting.name == "learning_rate" or setting.moved_samples)
    )


def _diagnosis_of(acting: Sequence[Setting], diagnosis: Diagnosis | None, names: tuple[str, str]) -> Diagnosis | None:
    """The diagnosis of a difference that stated settings explain: that of the numbers if it agrees, else that of the setting."""
    stated = {_SIGNATURES[each.name]: each for each in acting if each.name in _SIGNATURES}
    if not stated or (diagnosis is not None and diagnosis.signature in stated):
        return diagnosis if stated else None
    signature, setting = next(iter(stated.items()))
    return Diagnosis(signature, f"{setting.describe(names)}.")


_SIGNATURES = {
    "learning_rate": "constant_factor",
    "weight_decay": "weight_decay",
    "eps": "optimizer_epsilon",
    EPS_HAT: "optimizer_epsilon",
}
"""The signature of each setting whose effect has one."""


def _caused(pair: Pair, judged: list[Judgement]) -> list[Judgement]:
    """Accept moments and updates outside their bounds if both sides follow the optimizer's rule.

    Such values follow from gradients or moments that were within their bounds; squares and ratios amplify rounding.
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
    """The bound on norm(a - b) without perturbed runs."""
    return (quantity.bound or 0.0) * quantity.scale
