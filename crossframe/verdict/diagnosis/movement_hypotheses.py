"""Hypotheses that data was moved incorrectly: transposed, shifted, of another step, of another parameter."""

from collections.abc import Iterator

import numpy as np

from crossframe.recording.event_format import BACKWARD, FORWARD, REDUCE, STATE, UNSHARDED, UPDATE
from crossframe.verdict.diagnosis.case import Case
from crossframe.verdict.diagnosis.fit import Claim, Fit, accepted
from crossframe.verdict.diagnosis.movement_fits import read_elsewhere, same_as, shift_of, transposition_of
from crossframe.verdict.diagnosis.rank_fits import mixed_ranks
from crossframe.verdict.diagnosis.rank_hypotheses import SHARDED
from crossframe.verdict.diagnosis.tied_weights import rows_looked_up, uses_of
from crossframe.verdict.measure.metrics import distance, norm

MOST_FLAT = 1 << 22
"""The largest number of elements of all parameters among which those of one are looked for."""


def transposed(case: Case) -> Iterator[Fit]:
    """The elements are in another order of dims."""
    if case.swapped or not case.whole:
        return
    if found := transposition_of(case.sides):
        yield Fit("transposed", f"{_holds(case)}, {found.text}", found.residual, 0.0, Claim(found.text))


def padding_shift(case: Case) -> Iterator[Fit]:
    """The elements are shifted, possibly by a length of padding."""
    if case.swapped or case.phase not in (*SHARDED, BACKWARD):
        return
    paddings = _paddings(case)
    shift = shift_of(case.both, case.start, case.stop, [*paddings])
    if shift is None:
        return
    elements = f"{abs(shift.by)} element{'s' if abs(shift.by) > 1 else ''}"
    places = f"shifted by {elements} to {'later' if shift.by > 0 else 'earlier'} positions"
    why = f", the length of {paddings[abs(shift.by)]}" if abs(shift.by) in paddings else ""
    text = f"{_holds(case)} {places}, in all {shift.overlap} elements whose source is known{why}"
    yield Fit("padding_shift", text, shift.residual)


def read_from_others(case: Case) -> Iterator[Fit]:
    """A reduced gradient was read at another position of a flat tensor, so that it has the values of other parameters."""
    specs = case.right.manifest.params
    if case.phase != REDUCE or not case.whole or sum(spec.numel for spec in specs.values()) > MOST_FLAT:
        return
    others = {
        name: value
        for name in specs
        if name != case.name and (value := case.read(case.right, REDUCE, case.step, name)) is not None
    }
    if found := read_elsewhere(case.sides, others):
        also = f", and then those of {', '.join(map(repr, found.names[1:]))}" if found.names[1:] else ""
        text = (
            f"{case.names[1]} has the elements of {found.first!r} from {found.start} on{also}, as if read from a flat tensor of "
            "parameters and padding at another position"
        )
        yield Fit("padding_shift", text, found.residual)


def _paddings(case: Case) -> dict[int, str]:
    """Lengths of padding in the unit, with descriptions."""
    found: dict[int, str] = {}
    for recording in (case.wrong, case.right):
        manifest = recording.manifest
        for _, layout in manifest.units:
            names = [param.name for param in layout.params]
            spaces = getattr(layout, "spaces", None)
            if case.name not in names or spaces is None:
                continue
            i = names.index(case.name)
            found.setdefault(sum(spaces[: i + 1]), "all padding before it in its unit")
            found.setdefault(spaces[i], "the padding directly before it")
            found.setdefault(spaces[i + 1], "the padding directly after it")
            found.setdefault(spaces[-1], "the padding at the end of its unit")
    found.pop(0, None)
    return found


def stale_copy(case: Case) -> Iterator[Fit]:
    """The value of the previous step, or a value that the step did not change."""
    if case.phase in (STATE, UPDATE):
        yield from _not_stepped(case)
        return
    earlier = _step_before(case)
    if earlier is None:
        return
    text = f"{case.names[1]} {'gathered' if case.phase == UNSHARDED else 'has'} its value of the previous step"
    if case.phase == UNSHARDED and distance(case.sides.wrong, case.cut(earlier)) == 0.0:
        # Bitwise equal to the old value and not to the shards: accepted even for constant values.
        yield Fit("stale_copy", text, 0.0)
    elif found := same_as(case.sides, {text: case.cut(earlier)}):
        yield Fit("stale_copy", text, found.residual)
    if case.phase in (BACKWARD, REDUCE):
        both = case.sides.right + case.cut(earlier)
        tolerance = case.limit + 4 * case.sides.roundoff * norm(both)
        if accepted(residual := case.sides.residual(both), case.sides.difference, tolerance):
            text = f"{case.names[1]} has the sum of the gradients of the previous step and this one"
            yield Fit("stale_copy", text, residual, 0.0, Claim("added"))


def _step_before(case: Case) -> np.ndarray | None:
    """The quantity at the previous step of the wrong recording."""
    if case.phase == UNSHARDED:
        return _gathered(case, case.before(case.wrong, case.step - 1, case.name)) if case.step else None
    if case.phase in (BACKWARD, REDUCE):
        return case.gradient(case.wrong, case.step - 1, case.name)
    if case.phase == FORWARD and case.quantity.use:
        return case.activation(case.wrong, case.step - 1, case.here)
    return None


def _gathered(case: Case, held: np.ndarray | None) -> np.ndarray | None:
    """A value cast as the all-gather does."""
    return held if held is None or case.quantity.sketched else held.astype(case.quantity.a.dtype)


def lost_count(case: Case) -> Iterator[Fit]:
    """The optimizer's count of steps began anew."""
    counts = [float(side.reshape(-1)[0]) for side in (case.both.right, case.both.wrong)]
    if counts[1] < counts[0]:
        text = f"the optimizer of {case.names[1]} counted {counts[1]:g} steps instead of {counts[0]:g}"
        yield Fit("lost_step", text, 0.0, 0.0, Claim("count", counts[1]))


def _not_stepped(case: Case) -> Iterator[Fit]:
    slot = case.quantity.use
    if case.phase == UPDATE:
        earlier, what = case.before(case.wrong, case.step, case.name), "the parameter"
    else:
        earlier, what = case.moment(case.wrong, case.step - 1, case.name, slot), slot
    if earlier is None or (case.quantity.sketched and earlier.shape != case.both.wrong.shape):
        return
    # Read again because judging replaced unsteady elements.
    now = case.both.wrong if case.quantity.sketched else case.read(case.wrong, case.phase, case.step, case.name, slot)
    if now is not None and norm(case.sides.right) and distance(case.cut(now), case.cut(earlier)) == 0.0:
        text = f"in {case.names[1]} the step did not change {what} in any bit"
        yield Fit("lost_step", text, 0.0)


def mixed_parameters(case: Case) -> Iterator[Fit]:
    """The values belong to another parameter."""
    if not case.name:
        return
    specs = case.right.manifest.params
    numel = specs[case.name].numel
    others = [name for name, spec in specs.items() if spec.numel == numel and name != case.name]
    for other in others:
        theirs = _of_other(case, other)
        if theirs is None:
            continue
        if found := same_as(case.sides, {other: case.cut(theirs)}):
            text = f"{case.names[1]} has the values of {other!r}"
            yield Fit("mixed_parameters", text, found.residual)
        if case.phase == REDUCE:
            yield from _mixed_on_ranks(case, other)


def _of_other(case: Case, other: str) -> np.ndarray | None:
    """The right side's quantity of another parameter."""
    if case.phase == UNSHARDED:
        return _gathered(case, case.before(case.right, case.step, other))
    if case.phase == BACKWARD:
        return case.gradient(case.right, case.step, other)
    return case.read(case.right, case.phase, case.step, other, case.quantity.use)


def _mixed_on_ranks(case: Case, other: str) -> Iterator[Fit]:
    own, theirs = case.local_grads(case.wrong, case.name), case.local_grads(case.wrong, other)
    if own is None or theirs is None:
        return
    both = [[case.cut(grad) for grad in grads] for grads in (own, theirs)]
    if found := mixed_ranks(case.sides, both[0], both[1], case.reduce_roundoff):
        text = f"in {case.names[1]} the sum contains the gradients of {other!r} from ranks {list(found.ranks)} instead of its own"
        yield Fit("mixed_parameters", text, found.residual, found.error)


def tied_weight(case: Case) -> Iterator[Fit]:
    """The gradient of one use of a tied weight is missing or counted twice."""
    if case.phase not in (BACKWARD, REDUCE) or not case.whole:
        return
    aliases = {alias for side in (case.right, case.wrong) for alias in side.manifest.params[case.name].aliases}
    if aliases and not norm(case.sides.wrong):
        text = f"its gradient is zero in {case.names[1]}: neither {case.name!r} nor {', '.join(map(repr, aliases))} contributes"
        yield Fit("tied_weight", text, 0.0)
        return
    found = uses_of(case.sides, _looked_up(case)) or uses_of(case.sides)
    if found is None or (found.looked_up is None and not aliases):
        return
    also = f" (also {', '.join(map(repr, aliases))})" if aliases else ""
    if found.looked_up is None:
        times = "is wrong"
    else:
        times = f"counts {('not at all', 'once', 'twice')[found.looked_up]}"
    text = (
        f"in {case.names[1]} the gradient of the {found.num_rows} rows that were looked up {times}, and the gradient of the "
        f"use of all {len(case.sides.right)} rows counts {('not at all', 'once', 'twice')[found.all_rows]}{also}"
    )
    yield Fit("tied_weight", text, found.residual)


def _looked_up(case: Case) -> np.ndarray | None:
    """Mask of the rows that the embedding looked up, on the rank of the quantity or on all ranks."""
    recording, rows = case.right, None
    for rank in case.ranks(recording):
        if (weight := case.as_used(recording, case.name, rank)) is None:
            return None
        names = (case.name, *recording.manifest.params[case.name].aliases)
        modules = {name.rpartition(".")[0] for name in names}
        for at in recording.activations(case.step):
            if at[1] in modules and at[2] == "output" and not recording.activation_sketch(case.step, rank, *at):
                found = rows_looked_up(weight, recording.activation(case.step, rank, *at))
                if found is not None:
                    rows = found if rows is None else rows | found
    return rows


def _holds(case: Case) -> str:
    if case.quantity.within:
        return f"in {case.names[1]} a rank gathered the values of the shards"
    return f"{case.names[1]} has the values of {case.names[0]}"


ALL = (stale_copy, mixed_parameters, transposed, padding_shift, read_from_others, tied_weight)
