"""Values that differ between the ranks which compute one replica together, within one of the runs.

Under tensor, sequence or expert parallelism these ranks gather what is divided, and hold what is replicated. Either way all of
them have the same tensor. The recorder compares them and writes a line where they differ
(`crossframe.recording.event_format`), since the recording itself has the values of the first of them alone.
"""

from crossframe.recording.index import Disagreement
from crossframe.verdict.divergence_text import NOUNS
from crossframe.verdict.measure.bounds_by_dtype import bounds_for
from crossframe.verdict.measure.comparable import labels
from crossframe.verdict.measure.locate import Divergence
from crossframe.verdict.measure.pair import Pair


def model_ranks_differ(pair: Pair) -> tuple[Divergence, str] | None:
    """(the first place, the reason) where such ranks of one run differ by more than rounding, and those of the other do not."""
    a, b = pair.a, pair.b
    steps = min(a.num_steps, b.num_steps)
    found = [
        {_key(each): each for each in recording.disagreements(steps) if _beyond(each, pair)} for recording in (a, b)
    ]
    for own, other, label in zip(found, reversed(found), labels(a, b), strict=True):
        for key, each in own.items():
            if key not in other:
                where = Divergence(
                    each.step, each.phase, None, each.unit, each.name, None, None, "model_ranks", each.ranks
                )
                return where, _describe(each, label, bounds_for(pair.dtype).parameter)
    return None


def _key(each: Disagreement) -> tuple[int, str, str, str]:
    return each.step, each.phase, each.name, each.use


def _beyond(each: Disagreement, pair: Pair) -> bool:
    return not each.difference <= bounds_for(pair.dtype).parameter


def _describe(each: Disagreement, label: str, bound: float) -> str:
    who = f"rank {each.ranks[0]}" if len(each.ranks) == 1 else f"ranks {', '.join(map(str, each.ranks))}"
    return (
        f"at step {each.step} the {NOUNS[each.phase]} of {each.name!r} in {label} is not the same on all ranks that compute one "
        f"replica: along the mesh axis {each.axis!r}, {who} differ{'s' if len(each.ranks) == 1 else ''} from the first by "
        f"{each.difference:.1e} (bound {bound:.1e}); sum it over this axis, or give all of its ranks the same values"
    )
