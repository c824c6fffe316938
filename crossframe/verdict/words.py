"""A divergence as a sentence."""

from collections.abc import Sequence

import numpy as np

from crossframe.recording.lines import BACKWARD, FORWARD, PARAMETERS, REDUCE, UPDATE
from crossframe.verdict.judge import Divergence, Judgement
from crossframe.verdict.quantities import OUTPUT

NOUNS = {
    PARAMETERS: "initial value",
    FORWARD: "loss",
    BACKWARD: "local gradient",
    REDUCE: "reduced gradient",
    UPDATE: "updated value",
}


def in_words(judgement: Judgement, where: Divergence, names: Sequence[str]) -> str:
    """What differs, where, and by how much.

    Args:
        names: what the two recordings are called.
    """
    q = judgement.quantity
    noun = f"the {NOUNS[q.phase]}"
    if q.kind == OUTPUT:
        unit = f"unit {q.unit!r}" if q.unit else "the model"
        what = (
            f"the output of {unit} (microbatch {q.microbatch}, elements {where.start}:{where.stop}, rank {where.rank})"
        )
    elif where.parameter is None:
        what = f"{noun} of rank {where.rank}" if where.rank is not None else "the mean loss over ranks"
    else:
        unit = f"unit {q.unit!r}" if q.unit else "the root unit"
        what = f"{noun} of {q.parameter!r} ({unit}, elements {where.start}:{where.stop}, rank {where.rank})"
    said = f"at step {q.step} {what}"
    if judgement.one_sided:
        # finite[i] as an index: the side that is not finite comes first whichever it is.
        finite = [bool(np.isfinite(np.asarray(side, np.float64)).all()) for side in (q.a, q.b)]
        if finite[0] != finite[1]:
            return f"{said} is not finite (NaN or infinity) in {names[finite[0]]} and finite in {names[finite[1]]}"
        return f"{said} is not finite (NaN or infinity) in other elements in {names[0]} than in {names[1]}"
    if q.bound is None:
        return f"{said} is not the same bit for bit in {names[0]} and {names[1]}: data was moved wrongly"
    return (
        f"{said} differs by {judgement.difference:.1e} between {names[0]} and {names[1]}, where rounding may reach "
        f"{q.bound:.1e}; everything that causes it agrees"
    )
