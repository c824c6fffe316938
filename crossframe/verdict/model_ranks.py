"""Values that differ between the ranks which compute one replica together, within one of the runs.

Under tensor, sequence or expert parallelism these ranks gather what is divided, and hold what is replicated. Either way all of
them have the same tensor. The recorder compares them and writes a line where they differ
(`crossframe.recording.event_format`), since the recording itself has the values of the first of them alone.

Parameters, reduced gradients and optimizer state that differ by more than the bound of the same quantity in two recordings are a
bug. A batch or an activation that differs is none by itself,
since a program may add up later what a module gives. Before such a bug it is the place where it began.
"""

import math

from crossframe.recording import Recording
from crossframe.recording.event_format import FORWARD, PARAMETERS, REDUCE, STATE, UPDATE
from crossframe.recording.event_index import UnequalRanks
from crossframe.verdict.divergence_text import NOUNS
from crossframe.verdict.measure.bounds_by_dtype import bounds_for
from crossframe.verdict.measure.causal_order import quantity_of
from crossframe.verdict.measure.comparable import labels
from crossframe.verdict.measure.locate import Divergence
from crossframe.verdict.measure.pair import Pair


def model_ranks_differ(pair: Pair) -> tuple[Divergence, str] | None:
    """(the first place, the reason) where such ranks of one run differ by more than rounding, and those of the other do not."""
    by_key = [{_key(each): each for each in recording.disagreements(pair.num_steps)} for recording in (pair.a, pair.b)]
    for side, (own, other) in enumerate((by_key, by_key[::-1])):
        first = None
        for key, each in own.items():
            bound = _bound(each, pair, side)
            if each.difference <= bound or (
                key in other and not other[key].difference <= _bound(other[key], pair, 1 - side)
            ):
                continue
            first = first or (each, bound)
            if each.phase != FORWARD:
                return _place(first[0], (pair.a, pair.b)[side]), _describe(
                    first[0], labels(pair.a, pair.b)[side], first[1]
                )
    return None


def _place(each: UnequalRanks, recording: Recording) -> Divergence:
    if each.phase == FORWARD:
        unit = recording.manifest.maker(each.name, each.use)
        module = each.name or None
        return Divergence(each.step, each.phase, None, unit, None, None, None, each.use, each.ranks, module)
    return Divergence(each.step, each.phase, None, each.unit, each.name, None, None, "model_ranks", each.ranks)


def _key(each: UnequalRanks) -> tuple[int, str, str, str]:
    return each.step, each.phase, each.name, each.use


def _bound(each: UnequalRanks, pair: Pair, side: int) -> float:
    """The bound on the difference of a tensor within one recording: that of the same quantity between two recordings.

    A recorder divides by norm(first), or by 1 if it is zero. The scale of a quantity may be larger, as twice the norm of squares.
    """
    bound = bounds_for(pair.dtype).parameter
    if each.difference <= bound or each.phase not in (REDUCE, STATE, UPDATE):
        return bound
    quantity = quantity_of(pair, each.phase, each.step, each.name, each.use if each.phase == STATE else "")
    if quantity is None or not math.isfinite(each.difference):
        return bound
    assert quantity.bound is not None
    return max(bound, quantity.bound * quantity.scale / (quantity.norms[side] or 1.0))


def _describe(each: UnequalRanks, label: str, bound: float) -> str:
    what, advice = (
        f"the {NOUNS[each.phase]} of {each.name!r}",
        "sum it over this axis, or give all of its ranks the same values",
    )
    if each.phase == PARAMETERS:
        advice = "give all of its ranks the same values"
    if each.phase == FORWARD:
        what = f"the {each.use} of module {each.name!r}" if each.name else "the batch"
        advice = "what all of its ranks hold must be the same" if each.name else "give all of its ranks the same batch"
    size = f" by {each.difference:.1e} (bound {bound:.1e})" if math.isfinite(each.difference) else ""
    who = f"rank {each.ranks[0]}" if len(each.ranks) == 1 else f"ranks {', '.join(map(str, each.ranks))}"
    return (
        f"at step {each.step} {what} in {label} is not the same on all ranks that compute one replica: along the mesh axis "
        f"{each.axis!r}, {who} differ{'s' if len(each.ranks) == 1 else ''} from the first{size}; {advice}"
    )
