"""Bits as evidence: whether two recordings are of one program, and what the first quantity says that differs in bits.

A deterministic program that is given the same bits gives the same bits. So if both recordings are of the same program, the first
quantity that differs, while everything that causes it is equal, was computed in another way, however small the difference is.
That is no proof of a bug: a changed kernel of the same function differs so, too.

Two recordings are of the same program if framework, versions, layout, mesh, strategy, dtypes, settings, device, processor, flags
and number of threads are stated, and equal. Their source may differ: that is what is looked for. Operators of an accelerator
count as nondeterministic unless deterministic algorithms were asked for, or a repetition of either run is equal in bits. If even
command, source and environment are equal, the pair is a repetition itself: what differs then is not deterministic. Perturbed runs
say nothing about this, since they begin from other values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from crossframe.errors import RecordingError
from crossframe.recording import Recording
from crossframe.recording.known_settings import COMMAND
from crossframe.recording.program import COMPILED, DETERMINISTIC, ENVIRONMENT, PROGRAM, SOURCE
from crossframe.shown import shown
from crossframe.verdict.measure.clipping import clipped_on_one_side
from crossframe.verdict.measure.comparable import labels
from crossframe.verdict.measure.judge import judge
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.measure.quantities import ACTIVATION, Quantity
from crossframe.verdict.measure.walk import walk

_DIGESTS = frozenset({SOURCE, ENVIRONMENT})
# Settings that say how a run was started or is called, and not what it computes.
_LABELS = frozenset({COMMAND, PROGRAM, "fault"})


@dataclass(frozen=True)
class Bits:
    """What equal and different bits say about a pair.

    Attributes:
        why_not: why bits are no evidence, in a clause; None if they are.
        repetition: whether both were recorded by the same command, source and environment.
        compiled: whether the program is compiled as a whole: a change elsewhere may then move rounding to the first difference.
        repeated: whether another recording of the same run is equal to it in all bits up to the first difference.
    """

    why_not: str | None
    repetition: bool = False
    compiled: bool = False
    repeated: bool = False


def bits_of(pair: Pair, first: Quantity, repeats: Sequence[Recording] = ()) -> Bits:
    """What the first quantity that differs in bits says.

    Args:
        repeats: other recordings of either run, made by the same command.

    Raises:
        RecordingError: a repeat that is not of the same run as either recording.
    """
    a, b = pair.a, pair.b
    why_not = not_same_program(a, b)
    if why_not is None and (step := next((s for s in range(pair.num_steps) if pair.reordered(s)), None)) is not None:
        why_not = f"from step {step} on, samples came in another order"
    if why_not is None and first.step in pair.steps and clipped_on_one_side(pair, first.step) is not None:
        why_not = "one of both clips gradients in a way of its own"
    if why_not is None:
        why_not = other_operator(pair, first)
    if why_not is not None:
        return Bits(why_not)
    program = a.manifest.settings[PROGRAM]
    compiled = bool(program.get(COMPILED))
    if is_repetition(a, b):
        said = "both were recorded by the same command, source and environment"
        return Bits(f"{said}, so what differs is not deterministic, or depends on something that is not recorded", True)
    for repeat in repeats:
        if (apart := _apart_before(repeat, a, b, first)) is not None:
            where = f"{apart.name or apart.event} at step {apart.step}"
            return Bits(
                f"another recording of the same run differs in bits, too, first in the {where}: it is not deterministic"
            )
    if not repeats and not program.get(DETERMINISTIC):
        return Bits(
            f"operators on {program['device']} may be nondeterministic: ask for deterministic algorithms, or pass a "
            "second recording of one of the runs with --repeat"
        )
    return Bits(None, compiled=compiled, repeated=bool(repeats))


def not_same_program(a: Recording, b: Recording) -> str | None:
    """Why two recordings are not known to be of the same program, in a clause; None if they are."""
    names = labels(a, b)
    programs = [recording.manifest.settings.get(PROGRAM) for recording in (a, b)]
    for name, program in zip(names, programs, strict=True):
        if not program:
            return f"{name} does not state on which device, and with how many threads, it ran"
    for name, x, y in _stated(a, b):
        if x != y:
            return f"{name} differs: {shown(x)} in {names[0]}, {shown(y)} in {names[1]}"
    return None


def _stated(a: Recording, b: Recording) -> list[tuple[str, Any, Any]]:
    """(what, in a, in b) of all that must be equal."""
    first, second = a.manifest, b.manifest
    found: list[tuple[str, Any, Any]] = [
        (name, getattr(first, name), getattr(second, name))
        for name in ("framework", "versions", "dtype", "mesh", "strategy", "units", "detail", "learning_rate", "seed")
    ]
    found = [(name, str(x), str(y)) if name == "mesh" else (name, x, y) for name, x, y in found]
    programs = [manifest.settings[PROGRAM] for manifest in (first, second)]
    for kept, left_out in ((programs, _DIGESTS), ([first.settings, second.settings], _LABELS)):
        names = [name for name in {**kept[0], **kept[1]} if name not in left_out]
        found += [(name, kept[0].get(name), kept[1].get(name)) for name in names]
    return [("layout", "one", "another") if name == "units" and x != y else (name, x, y) for name, x, y in found]


def is_repetition(a: Recording, b: Recording) -> bool:
    """Whether both recordings state the same program, command, source and environment."""
    if not_same_program(a, b) is not None:
        return False
    first, second = (recording.manifest.settings for recording in (a, b))
    digests = all(first[PROGRAM].get(name) == second[PROGRAM].get(name) is not None for name in _DIGESTS)
    return digests and first.get(COMMAND) == second.get(COMMAND) is not None


def other_operator(pair: Pair, first: Quantity) -> str | None:
    """That the two frameworks' operators that computed it have different names: another kernel."""
    if first.kind != ACTIVATION or first.rank is None:
        return None
    at = (first.microbatch, first.module, first.use)
    found = [recording.activation_operator(first.step, first.rank, *at) for recording in (pair.a, pair.b)]
    if found[0] == found[1] or not all(found):
        return None
    names = labels(pair.a, pair.b)
    return f"the {first.name} is computed by {found[0]} in {names[0]} and by {found[1]} in {names[1]}, another kernel"


def _apart_before(repeat: Recording, a: Recording, b: Recording, first: Quantity) -> Quantity | None:
    """Where a repetition of a run differs from it in bits, up to the place of a quantity and there; None if nowhere."""
    run = next((recording for recording in (a, b) if is_repetition(repeat, recording)), None)
    if run is None:
        raise RecordingError(
            f"{repeat.directory}: expected another recording of {a.directory} or of {b.directory}, made by the same command, "
            "source and environment; record one of them again, elsewhere"
        )
    for group in walk(Pair(run, repeat)):
        if any(not judge(quantity).equal for quantity in group):
            return group[0]
        if _place(group[0]) == _place(first):
            break
    return None


def _place(quantity: Quantity) -> tuple[int, str, str, str, int]:
    return quantity.step, quantity.phase, quantity.name, quantity.event, quantity.microbatch
