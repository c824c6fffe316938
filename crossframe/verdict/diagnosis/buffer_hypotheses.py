"""Hypotheses about a buffer, such as a running mean: it is not updated, or moves by another factor."""

from collections.abc import Iterator

import numpy as np

from crossframe.recording import Recording
from crossframe.verdict.diagnosis.case import Case
from crossframe.verdict.diagnosis.fit import Contrast, Fit, accepted, factor_between
from crossframe.verdict.measure.buffers import buffer_value, has_before
from crossframe.verdict.measure.metrics import distance, norm


def not_updated(case: Case) -> Iterator[Fit]:
    """One run has the value that the buffer had before the step."""
    before = _before(case, case.wrong)
    if before is not None and distance(case.both.wrong, before) == 0.0:
        text = f"{case.names[1]} has the value from before the step: the buffer is not updated"
        yield Fit("stale_copy", text, 0.0)


def factor_of_change(case: Case) -> Iterator[Fit]:
    """The step changes the buffer by c times as much, as with another momentum; or one side is c times the other."""
    if case.swapped:
        return
    a, b = case.names
    changes = [(f"{b} has {{:.6g}} times the values of {a}", np.zeros(case.both.right.shape))]
    before = case.in_both(lambda run: _before(case, run))
    if before is not None and distance(*before) == 0.0:
        changes.insert(0, (f"the step changes the buffer {{:.6g}} times as much in {b} as in {a}", before[0]))
    for text, start in changes:
        moved = Contrast(case.both.right - start, case.both.wrong - start, case.limit)
        factor = factor_between(moved.right, moved.wrong)
        rounding = 4 * case.both.roundoff * (norm(start) + norm(case.both.right))
        residual = moved.residual(factor * moved.right)
        if factor and accepted(residual, moved.difference, case.limit + rounding):
            yield Fit("constant_factor", text.format(factor), residual)
            return


def _before(case: Case, recording: Recording) -> np.ndarray | None:
    """The buffer before the step, in float64; None if it was not recorded."""
    q = case.quantity
    assert q.rank is not None
    if not has_before(recording, q.step - 1, q.step, q.buffer):
        return None
    side = buffer_value(recording, q.step - 1, q.rank, q.buffer)
    if q.sketches is not None:
        return side.sketched().folded(q.sketches[0].sums.size).sums
    return None if side.elements is None else np.asarray(side.elements, np.float64)


ALL = (not_updated, factor_of_change)
