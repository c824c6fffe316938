"""A divergence as a sentence, for the reason of a verdict (`crossframe.verdict.conclude`)."""

from collections.abc import Sequence

import numpy as np

from crossframe.recording.event_format import (
    BACKWARD,
    BUFFERS,
    COUNT,
    FORWARD,
    NORM,
    PARAMETERS,
    REDUCE,
    STATE,
    UNSHARDED,
    UPDATE,
)
from crossframe.verdict.measure.judge import Judgement
from crossframe.verdict.measure.locate import Divergence, who, with_ranks
from crossframe.verdict.measure.quantities import ACTIVATION, Quantity
from crossframe.verdict.unrecorded_causes import Unrecorded

NOUNS = {  # in the causal order of a step
    PARAMETERS: "initial value",
    UNSHARDED: "unsharded value",
    FORWARD: "loss",
    BACKWARD: "local gradient",
    REDUCE: "reduced gradient",
    NORM: "norm of the gradient",
    STATE: "optimizer state",
    UPDATE: "updated value",
    BUFFERS: "buffer",
}


def describe(
    judgement: Judgement, where: Divergence, names: Sequence[str], *, by: str = "", unseen: Unrecorded | None = None
) -> str:
    """The first divergence as a sentence: the quantity, its location, its difference and its bound.

    Args:
        names: names of the two recordings.
        by: the perturbed runs that measured the bound, if any.
        unseen: unrecorded steps that may contain the cause.
    """
    q = judgement.quantity
    subject = f"at step {q.step} {_what(q, where)}"
    if judgement.one_sided:
        return f"{subject} {_not_finite(q, names)}"
    if q.within:
        own = names[q.within == "b"]
        return (
            f"{subject} is not bitwise equal to the shards of {own} before the step: {own} moved data incorrectly, or its loop "
            "changed parameters between steps"
        )
    if q.use == COUNT:
        return f"{subject} is {q.a[0]:g} in {names[0]} and {q.b[0]:g} in {names[1]}"
    if q.bound is None:
        return f"{subject} is not bitwise equal in {names[0]} and {names[1]}: data was moved incorrectly"
    bound = f"{q.bound:.1e}{f' measured on {by}' if by else ''}"
    return (
        f"{subject} differs by {judgement.difference:.1e} between {names[0]} and {names[1]}, more than the bound of {bound}; "
        f"{unseen.describe() if unseen else 'all of its causes agree'}"
    )


def describe_quantity(judgement: Judgement | None) -> str:
    assert judgement is not None
    q = judgement.quantity
    rank = f" of rank {q.rank}" if q.rank is not None else ""
    if q.buffer:
        return f"buffer {q.buffer!r}{rank}"
    if q.kind == ACTIVATION or not q.name:
        return f"{q.name or q.event}{rank}"
    return f"{NOUNS[q.phase]} ({q.name}){rank}"


def other_dtype(q: Quantity, names: Sequence[str]) -> str:
    """A clause saying that an activation's dtypes differ."""
    return f"the {q.name} is {' and '.join(f'{dtype} in {name}' for dtype, name in zip(q.dtypes, names, strict=True))}"


def _what(q: Quantity, where: Divergence) -> str:
    noun = f"the {NOUNS[q.phase]}{f' of backward {q.microbatch}' if q.event == 'loss' and q.microbatch else ''}"
    rank = f", {who(where.rank, where.ranks)}" if where.rank is not None else ""
    elements = f", elements {where.start}:{where.stop}" if where.start is not None else ""
    if q.kind == ACTIVATION:
        unit = f"unit {q.unit!r}, " if q.unit and q.unit != q.module else ""
        module = f"{'unit' if q.module == q.unit else 'module'} {q.module!r}" if q.module else "the model"
        return f"the {q.use} of {module} ({unit}microbatch {q.microbatch}{elements}{rank})"
    if q.buffer:
        return f"the buffer {q.buffer!r} ({f'unit {q.unit!r}' if q.unit else 'the root unit'}{elements}{rank})"
    if where.parameter is None:
        return (
            with_ranks(noun, where.rank, where.ranks) if where.rank is not None else f"the mean {noun[4:]} over ranks"
        )
    unit = f"unit {q.unit!r}" if q.unit else "the root unit"
    if q.use:
        noun = "the optimizer's count of steps" if q.use == COUNT else f"the optimizer's {q.use!r}"
    return f"{noun} of {q.parameter!r} ({unit}{elements}{rank})"


def _not_finite(q: Quantity, names: Sequence[str]) -> str:
    if q.sketches:
        lost = [sketch.num_not_finite for sketch in q.sketches]
        return f"has {lost[0]} NaN or infinite elements in {names[0]} and {lost[1]} in {names[1]}"
    finite = [bool(np.isfinite(np.asarray(side, np.float64)).all()) for side in (q.a, q.b)]
    if finite[0] != finite[1]:
        return f"is not finite (NaN or infinity) in {names[finite[0]]} and finite in {names[finite[1]]}"
    return f"is not finite (NaN or infinity) in different elements in {names[0]} and {names[1]}"
