"""Finds the hypothesis that explains the first difference of two recordings."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np

from crossframe.dtypes import coarser
from crossframe.errors import RecordingError
from crossframe.recording import Recording, common_steps
from crossframe.recording.event_format import BACKWARD, BUFFERS, COUNT, FORWARD, PARAMETERS
from crossframe.verdict.diagnosis import (
    buffer_hypotheses,
    count_hypotheses,
    layer_hypotheses,
    module_hypotheses,
    movement_hypotheses,
    optimizer_hypotheses,
    rank_hypotheses,
)
from crossframe.verdict.diagnosis.batches import Other, batch_difference, fed_to
from crossframe.verdict.diagnosis.case import Case, case_of
from crossframe.verdict.diagnosis.factor_hypotheses import constant_factor
from crossframe.verdict.diagnosis.fit import SIGNATURES, Fit, best
from crossframe.verdict.measure.bounds_by_dtype import bounds_for
from crossframe.verdict.measure.causal_order import walk
from crossframe.verdict.measure.comparable import labels
from crossframe.verdict.measure.judge import Judgement
from crossframe.verdict.measure.locate import Divergence
from crossframe.verdict.measure.metrics import distance, norm
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.measure.quantities import ACTIVATION, Quantity
from crossframe.verdict.measure.values import assemble

LEAVES = "; this leaves "
"""In the text of a diagnosis, what follows states how well the hypothesis fits."""

Limit = Callable[[Quantity], float]
_OF_VALUES = (*movement_hypotheses.ALL, *rank_hypotheses.ALL, constant_factor)
_OF_SKETCHES = (movement_hypotheses.stale_copy, rank_hypotheses.missing_rank, constant_factor)


@dataclass(frozen=True)
class Diagnosis:
    """The accepted hypothesis for a difference.

    Attributes:
        signature: one of `crossframe.verdict.diagnosis.SIGNATURES`.
        evidence: a sentence with the supporting numbers.
    """

    signature: str
    evidence: str

    def __post_init__(self) -> None:
        assert self.signature in SIGNATURES, self.signature

    def to_json(self) -> dict:
        return asdict(self)


def diagnose(pair: Pair, judgement: Judgement, where: Divergence, limit: Limit) -> Diagnosis | None:
    """Return the hypothesis that explains the first quantity outside its bound; None if there is none.

    Args:
        where: the location within the quantity.
        limit: the bound on norm(a - b) of a quantity due to rounding.
    """
    if judgement.one_sided or judgement.both_not_finite:
        return None
    with np.errstate(all="ignore"):  # values elsewhere that are not finite fit no hypothesis
        return _diagnose(pair, judgement, where, limit)


def _diagnose(pair: Pair, judgement: Judgement, where: Divergence, limit: Limit) -> Diagnosis | None:
    case = case_of(pair, judgement.quantity, limit)
    fit = best(_fits(case))
    part = _part(case, where)
    if fit is None and part is not None:
        case, fit = part, best(_fits(part))
    if fit is None:
        return _by_size(case_of(pair, judgement.quantity, limit))
    text = f"{fit.evidence}{LEAVES}{fit.residual:.2g} of a difference of {case.sides.difference:.2g}"
    if case.start is not None:
        text = f"in elements {case.start}:{case.stop}, which differ on rank {where.rank}, {text}"
    return Diagnosis(fit.signature, f"{text}{_in_others(pair, case, fit, limit)}.")


def _by_size(case: Case) -> Diagnosis | None:
    """The diagnosis of a difference that is explained by no hypothesis, but looks like rounding in float32."""
    if case.quantity.sketched or case.quantity.kind not in (ACTIVATION, BACKWARD):
        return None
    if not module_hypotheses.noise_of_float32(case):
        return None
    ratio = case.sides.difference / norm(case.sides.right)
    return Diagnosis(
        "low_precision",
        f"the difference is {ratio:.1e} of the values, as large as rounding in float32, and has no direction, as if a part is "
        "computed in float32 by one run, or by each run in its own way.",
    )


def _fits(case: Case) -> Iterator[Fit]:
    """All accepted hypotheses, with either side assumed to be right."""
    if case.phase == BUFFERS:
        hypotheses = buffer_hypotheses.ALL
    elif case.quantity.use == COUNT:
        hypotheses = (movement_hypotheses.lost_count,)
    elif case.quantity.sketched:
        hypotheses = _OF_SKETCHES
    elif case.quantity.kind == FORWARD:
        hypotheses = (module_hypotheses.low_precision, *count_hypotheses.OF_LOSS, *_OF_VALUES)
    elif case.quantity.kind == ACTIVATION:
        hypotheses = (*layer_hypotheses.ALL, *module_hypotheses.ALL, *_OF_VALUES)
    else:
        hypotheses = (*count_hypotheses.ALL, *optimizer_hypotheses.ALL, *_OF_VALUES)
    for either in (case,) if case.quantity.within else (case, case.swap()):
        for hypothesis in hypotheses:
            yield from hypothesis(either)


def _part(case: Case, where: Divergence) -> Case | None:
    """The case for the elements that differ on one rank; None if these are all elements."""
    if case.quantity.sketched or not case.name or where.start is None or where.stop is None:
        return None
    if where.stop - where.start in (0, 1, case.quantity.a.size):
        return None
    return case.within(where.start, where.stop)


def _in_others(pair: Pair, case: Case, fit: Fit, limit: Limit) -> str:
    """A clause with the number of other differing parameters, in the same phase of the step, for which the same claim holds."""
    if case.phase == FORWARD or not case.name:
        return ""
    differ, agree = 0, 0
    for group in walk(pair, (case.phase,), range(case.step, case.step + 1)):
        if group[0].parameter == case.name or group[0].use != case.quantity.use:
            continue
        quantity = max(group, key=lambda each: distance(each.a, each.b))
        other = case_of(pair, quantity, limit)
        if not np.isfinite(other.sides.difference) or other.sides.difference <= other.limit:
            continue
        differ += 1
        agree += any(each.signature == fit.signature and each.claim.same(fit.claim) for each in _fits(other))
    if not differ:
        return "; no other parameter differs there"
    return f"; the same holds for {agree} of {differ} other parameters that differ there"


def follows_optimizer(pair: Pair, quantity: Quantity) -> bool:
    """Whether both sides follow the optimizer's rule, so that they differ only because of their inputs."""
    if quantity.within:
        return False
    with np.errstate(all="ignore"):
        return optimizer_hypotheses.follows(case_of(pair, quantity, lambda _: 0.0))


def needs_full_tensors(judgement: Judgement) -> str | None:
    """How to get a diagnosis if only sketches were compared; None if elements were compared."""
    if not judgement.quantity.sketched:
        return None
    return (
        f"only a sketch of the {judgement.quantity.name} was compared: for a diagnosis, record step {judgement.quantity.step} "
        "densely and in full (detail='full')"
    )


def diagnose_batches(a: Recording, b: Recording) -> Diagnosis | None:
    """Return how the batches of two runs differ; None if they are equal over the common steps."""
    num_steps = len(common_steps(a, b))
    try:
        fed = fed_to(a, num_steps), fed_to(b, num_steps)
    except (KeyError, RecordingError):
        return None
    found = batch_difference(*fed, labels(a, b))
    if found is None:
        return None
    told = _inputs_or_labels(a, b, found) if found.same_samples else ""
    return Diagnosis(
        "lost_step" if found.lost_step else "other_batches", f"from step {found.step} on, {found.text}{told}."
    )


def diagnose_untied(a: Recording, b: Recording) -> Diagnosis | None:
    """Return that a weight is tied in one run and a parameter of its own in the other; None if there is no such parameter."""
    names = labels(a, b)
    for own, tied, called in ((a, b, names), (b, a, names[::-1])):
        for name in own.manifest.params.keys() - tied.manifest.params.keys():
            for other, spec in tied.manifest.params.items():
                if name not in spec.aliases:
                    continue
                text = (
                    f"{name!r} is a parameter of its own in {called[0]}, and another name of {other!r} in {called[1]}"
                )
                return Diagnosis("tied_weight", f"{text}{_started(own, name, other)}.")
    return None


def _started(recording: Recording, *names: str) -> str:
    """A clause on whether two parameters of a recording start equal; "" if they were not recorded."""
    if not all(name in recording.manifest.params and recording.has(PARAMETERS, 0, name) for name in names):
        return ""
    first, second = (assemble(recording, PARAMETERS, 0, name) for name in names)
    if first.elements is None or second.elements is None:
        return ""
    return f"; both start {'equal' if np.array_equal(first.elements, second.elements) else 'with different values'}"


def _inputs_or_labels(a: Recording, b: Recording, found: Other) -> str:
    """A clause saying whether inputs or labels differ, from the first activation of forward; "" if it was not recorded."""
    both = [at for at in a.activations(found.step) if at in b.activations(found.step)]
    if not both or a.activation_sketch(found.step, 0, *both[0]) or b.activation_sketch(found.step, 0, *both[0]):
        return ""
    bound = bounds_for(coarser(a.manifest.dtype, b.manifest.dtype)).parameter
    for rank in range(a.manifest.world_size):
        x, y = (recording.activation(found.step, rank, *both[0]) for recording in (a, b))
        if x.shape != y.shape or distance(x, y) > bound * norm(x):
            return f"; the {both[0][2]} of {both[0][1] or 'the model'} differs, so inputs differ"
    return f"; the {both[0][2]} of {both[0][1] or 'the model'} does not differ, so labels differ"
