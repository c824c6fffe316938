"""Bitwise evidence: whether both recordings are of the same program, and where they first differ in bits.

A deterministic program computes the same bits from the same bits. If both recordings are of the same program, the first quantity
that differs although all of its causes are equal was computed differently, however small the difference is. This does not prove a
bug: a different kernel for the same function also differs.

Two recordings are of the same program if both state framework, versions, layout, mesh, strategy, dtypes, settings, device,
processor, flags and number of threads, and all of these are equal. The source may differ. Operators of an accelerator count as
nondeterministic unless deterministic algorithms were requested or a repetition of either run is bitwise equal. If command, source
and environment are equal too, the pair itself is a repetition, so any difference is nondeterministic. Perturbed runs are not used
here because they start from other values.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from crossframe.errors import RecordingError
from crossframe.quoting import quote
from crossframe.recording import Recording
from crossframe.recording.event_format import PARAMETERS, STATE, UPDATE
from crossframe.recording.known_settings import COMMAND
from crossframe.recording.program import COMPILED, DETERMINISTIC, ENVIRONMENT, OPTIMIZER_KERNEL, PROGRAM, SOURCE
from crossframe.verdict.measure.causal_order import walk
from crossframe.verdict.measure.clipping import clipped_on_one_side
from crossframe.verdict.measure.comparable import labels
from crossframe.verdict.measure.judge import judge
from crossframe.verdict.measure.loss_scale import scaled_on_one_side
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.measure.quantities import ACTIVATION, Quantity

_DIGESTS = frozenset({SOURCE, ENVIRONMENT})
# Settings that do not affect what a run computes.
_LABELS = frozenset({COMMAND, PROGRAM, "fault"})


@dataclass(frozen=True)
class Bits:
    """Whether a bitwise difference is evidence.

    Attributes:
        objection: why it is not evidence, as a clause; None if it is.
        repetition: whether both were recorded by the same command, source and environment.
        compiled: whether the whole program is compiled, so that a change elsewhere can alter rounding at the first difference.
        repeated: whether a repetition of the same run is bitwise equal up to the first difference.
    """

    objection: str | None
    repetition: bool = False
    compiled: bool = False
    repeated: bool = False


def bits_of(pair: Pair, first: Quantity, repeats: Sequence[Recording] = ()) -> Bits:
    """Decide whether the first quantity that differs in bits is evidence.

    Args:
        repeats: further recordings of either run, made by the same command.

    Raises:
        RecordingError: a repeat that is not of the same run as either recording.
    """
    a, b = pair.a, pair.b
    if objection := next(_objections(pair, first), None):
        return Bits(objection)
    program = a.manifest.settings[PROGRAM]
    if is_repetition(a, b):
        reason = "both were recorded by the same command, source and environment"
        return Bits(
            f"{reason}, so the difference is nondeterministic or depends on something that is not recorded", True
        )
    for repeat in repeats:
        if (apart := _apart_before(repeat, a, b, first)) is not None:
            where = f"{apart.name or apart.event} at step {apart.step}"
            return Bits(
                f"another recording of the same run also differs in bits, first in the {where}: the run is not deterministic"
            )
    if not repeats and not program.get(DETERMINISTIC):
        return Bits(
            f"operators on {program['device']} may be nondeterministic: ask for deterministic algorithms, or pass a "
            "second recording of one of the runs with --repeat"
        )
    return Bits(None, compiled=bool(program.get(COMPILED)), repeated=bool(repeats))


def _objections(pair: Pair, first: Quantity) -> Iterator[str]:
    """What may have changed the bits of two recordings, as clauses."""
    if objection := program_difference(pair.a, pair.b):
        yield objection
    if (step := next((step for step in range(first.step + 1) if pair.reordered(step)), None)) is not None:
        yield (
            f"from step {step} on, samples are in a different order, in other microbatches, or with further arrays or other "
            "numbers"
        )
    if any(step <= first.step for step in pair.routed.values()):
        yield f"the rows of {next(iter(pair.routed))!r} come in another order, so sums over them round in another way"
    if first.step in pair.steps and clipped_on_one_side(pair, first.step) is not None:
        yield "gradients were recorded after clipping in one of them and before it in the other"
    if first.phase != PARAMETERS and first.kind != ACTIVATION and scaled_on_one_side(pair, first.step):
        yield "one of them multiplies its loss and divides its gradients"
    if objection := operator_difference(pair, first):
        yield objection


def program_difference(a: Recording, b: Recording) -> str | None:
    """Why two recordings are not known to be of the same program, as a clause; None if they are."""
    names = labels(a, b)
    programs = [recording.manifest.settings.get(PROGRAM) for recording in (a, b)]
    for name, program in zip(names, programs, strict=True):
        if not program:
            return f"{name} does not state its device and number of threads"
    for name, x, y in _stated(a, b):
        if x != y:
            return f"{name} differs: {quote(x)} in {names[0]}, {quote(y)} in {names[1]}"
    return None


def _stated(a: Recording, b: Recording) -> list[tuple[str, Any, Any]]:
    """(name, value in a, value in b) of everything that must be equal."""
    first, second = a.manifest, b.manifest
    found: list[tuple[str, Any, Any]] = [
        (name, getattr(first, name), getattr(second, name))
        for name in ("framework", "versions", "dtype", "mesh", "strategy", "units", "detail", "learning_rate", "seed")
    ]
    found = [(name, str(x), str(y)) if name == "mesh" else (name, x, y) for name, x, y in found]
    programs = [manifest.settings[PROGRAM] for manifest in (first, second)]
    for kept, left_out in ((programs, _DIGESTS | {OPTIMIZER_KERNEL}), ([first.settings, second.settings], _LABELS)):
        names = [name for name in {**kept[0], **kept[1]} if name not in left_out]
        found += [(name, kept[0].get(name), kept[1].get(name)) for name in names]
    return [("layout", "one", "another") if name == "units" and x != y else (name, x, y) for name, x, y in found]


def is_repetition(a: Recording, b: Recording) -> bool:
    """Whether both recordings state the same program, command, source and environment."""
    if program_difference(a, b) is not None:
        return False
    first, second = (recording.manifest.settings for recording in (a, b))
    digests = all(first[PROGRAM].get(name) == second[PROGRAM].get(name) is not None for name in _DIGESTS)
    return digests and first.get(COMMAND) == second.get(COMMAND) is not None


def operator_difference(pair: Pair, first: Quantity) -> str | None:
    """A clause saying that different operators computed the quantity; None if the operators are the same or not known."""
    names = labels(pair.a, pair.b)
    if first.phase in (STATE, UPDATE):
        kernels = [(r.manifest.settings.get(PROGRAM) or {}).get(OPTIMIZER_KERNEL) for r in (pair.a, pair.b)]
        if kernels[0] == kernels[1] or not all(kernels):
            return None
        return f"the optimizer's step is {kernels[0]} in {names[0]} and {kernels[1]} in {names[1]}, a different kernel"
    if first.kind != ACTIVATION or first.rank is None:
        return None
    at = (first.microbatch, first.module, first.use)
    found = [recording.activation_operator(first.step, first.rank, *at) for recording in (pair.a, pair.b)]
    if found[0] == found[1] or not all(found):
        return None
    return (
        f"the {first.name} is computed by {found[0]} in {names[0]} and by {found[1]} in {names[1]}, a different kernel"
    )


def _apart_before(repeat: Recording, a: Recording, b: Recording, first: Quantity) -> Quantity | None:
    """The first quantity, up to and including `first`, in which a repetition differs in bits from its run; None if there is
    none."""
    run = next((recording for recording in (a, b) if is_repetition(repeat, recording)), None)
    if run is None:
        raise RecordingError(
            f"{repeat.directory}: expected another recording of {a.directory} or of {b.directory}, made by the same command, "
            "source and environment; record one of them again in another directory"
        )
    for group in walk(Pair(run, repeat)):
        if any(not judge(quantity).equal for quantity in group):
            return group[0]
        if _place(group[0]) == _place(first):
            break
    return None


def _place(quantity: Quantity) -> tuple[int, str, str, str, int]:
    return quantity.step, quantity.phase, quantity.name, quantity.event, quantity.microbatch
