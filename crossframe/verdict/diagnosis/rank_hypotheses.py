"""Hypotheses about what single ranks brought into a quantity, or hold of it."""

import math
from collections.abc import Iterator

import numpy as np

from crossframe.recording.lines import COUNT, NORM, PARAMETERS, REDUCE, STATE, UNSHARDED, UPDATE
from crossframe.verdict.diagnosis.case import Case
from crossframe.verdict.diagnosis.fit import Claim, Fit, accepted
from crossframe.verdict.diagnosis.reduction_fits import absent_ranks, low_reduction, weighted_ranks
from crossframe.verdict.measure.metrics import distance, norm

SHARDED = (PARAMETERS, UNSHARDED, REDUCE, STATE, UPDATE)
"""Phases whose quantities are put together from ranks' pieces."""


def factor_of_ranks(case: Case) -> Iterator[Fit]:
    """Some ranks' gradients count another number of times than once."""
    if case.phase != REDUCE or case.quantity.sketched or (grads := case.local_grads(case.wrong, case.name)) is None:
        return
    found = weighted_ranks(case.sides, [case.cut(grad) for grad in grads], case.reduce_roundoff)
    if found is not None:
        said = ", ".join(f"those of rank {rank} count {found.times[rank]:.6g} times" for rank in found.ranks)
        claim = Claim(f"times of rank {found.ranks}", found.times[found.ranks[0]], found.uncertainty)
        yield Fit(
            "constant_factor", f"of the gradients that {case.names[1]} averages {said}", found.rest, found.error, claim
        )


def missing_rank(case: Case) -> Iterator[Fit]:
    """What one rank or several should have brought in."""
    if case.phase == NORM:
        yield from _norm_of_one(case)
    if case.phase == REDUCE and (grads := case.local_grads(case.wrong, case.name)) is not None:
        found = absent_ranks(case.sides, [case.cut(grad) for grad in grads], case.reduce_roundoff)
        if found is not None:
            divided = f"the sum of the others is divided by {found.divided_by:g}"
            said = f"in {case.names[1]} the gradients of ranks {list(found.ranks)} of {len(grads)} are not in it; {divided}"
            yield Fit("missing_rank", said, found.rest, found.error, Claim(said))
    if case.phase in SHARDED and case.whole and case.quantity.use != COUNT:
        yield from _missing_slice(case)
        yield from _missing_slice_of_unit(case)


def _missing_slice(case: Case) -> Iterator[Fit]:
    """One rank's piece alone is zeros, or was left as it was before."""
    right, wrong = case.both.right.reshape(-1), case.both.wrong.reshape(-1)
    fills = {"zeros": np.zeros_like(wrong)}
    if case.phase in (UNSHARDED, UPDATE):
        before = case.before(case.wrong, case.step - (case.phase == UNSHARDED), case.name) if case.step else None
        if before is not None:
            fills["what they were before the step"] = np.asarray(before, np.float64).reshape(-1)
    own = case.wrong.manifest.mesh.coordinate(case.quantity.rank)[1] if case.quantity.rank is not None else None
    for rank in range(case.wrong.manifest.mesh.shard):
        held = case.elements_of(rank)
        # What lies on one rank as a whole says little, but that another rank should see zeros in its place.
        least_said = held.size == wrong.size and (case.phase != UNSHARDED or rank == own)
        if not held.size or not norm(right[held]) or least_said:
            continue
        for said, fill in fills.items():
            predicted = right.copy()
            predicted[held] = fill[held]
            if accepted(rest := distance(wrong, predicted), case.both.difference, case.limit):
                whose = _global_rank(case, rank)
                evidence = f"the {held.size} elements that rank {whose} holds are {said} in {case.names[1]}, the others are right"
                yield Fit("missing_rank", evidence, rest, 0.0, Claim(f"{rank} {said}"))


def _global_rank(case: Case, place: int) -> int:
    """The rank at a place among the shards, of the copy of the model that is looked at."""
    return case.replica_of(case.wrong) * case.wrong.manifest.mesh.shard + place


def _missing_slice_of_unit(case: Case) -> Iterator[Fit]:
    """What lies on one rank as a whole is zeros, and so is all else that the rank holds of its unit; what others hold is not."""
    right, wrong = case.both.right, case.both.wrong
    if case.phase == UNSHARDED or norm(wrong) or not norm(right):
        return
    unit, parts = case.wrong.manifest.unit_of[case.name], {"zeros": 0, "right": 0, "elsewhere": 0}
    ranks = [rank for rank in range(case.wrong.manifest.mesh.shard) if case.elements_of(rank).size]
    if len(ranks) != 1:
        return
    for name in case.wrong.manifest.params:
        if case.wrong.manifest.unit_of[name] != unit:
            continue
        wanted, found = (
            case.read(side, case.phase, case.step, name, case.quantity.use) for side in (case.right, case.wrong)
        )
        if wanted is None or found is None:
            return
        wanted, found, held = wanted.reshape(-1), found.reshape(-1), case.elements_of(ranks[0], name)
        if norm(found[held]):
            return
        parts["zeros"] += held.size
        parts["right"] += int(np.count_nonzero(wanted[held]))
        parts["elsewhere"] += int(np.count_nonzero(found))
    if parts["elsewhere"] and parts["right"] > right.size:
        whose = f"rank {_global_rank(case, ranks[0])} holds of {unit or 'the root unit'!r}"
        evidence = (
            f"all {parts['zeros']} elements that {whose} are zeros in {case.names[1]}, and those of other ranks are not"
        )
        yield Fit("missing_rank", evidence, 0.0, 0.0, Claim(f"{ranks[0]} zeros"))


def _norm_of_one(case: Case) -> Iterator[Fit]:
    """A norm over what one rank holds, or over what all the others hold."""
    manifest, squares = case.wrong.manifest, np.zeros(case.wrong.manifest.mesh.shard)
    for name in manifest.params:
        for run in case.wrong.runs(REDUCE, case.step, name):
            if run.rank < squares.size:
                if run.sketch is not None:
                    return
                squares[run.rank] += norm(case.wrong.elements(case.step, run)) ** 2
    if squares.size < 2:
        return
    for rank in range(squares.size):
        for said, square in (("alone", squares[rank]), ("left out", squares.sum() - squares[rank])):
            predicted = np.array([math.sqrt(square)])
            tolerance = case.limit + 4 * case.compute_roundoff * math.sqrt(square)
            if accepted(rest := case.both.rest(predicted), case.both.difference, tolerance):
                evidence = f"the norm in {case.names[1]} is that over the shards with those of rank {rank} {said}"
                yield Fit("missing_rank", evidence, rest, 0.0, Claim("norm"))


def low_precision_reduction(case: Case) -> Iterator[Fit]:
    """A sum over ranks in a coarser dtype."""
    if case.phase != REDUCE or case.quantity.sketched:
        return
    grads = case.local_grads(case.wrong, case.name)
    cut = None if grads is None else [case.cut(grad) for grad in grads]
    mesh, microbatches = case.wrong.manifest.mesh, case.microbatches
    if found := low_reduction(case.sides, cut, mesh.world_size, case.reduce_roundoff, mesh.replicate, microbatches):
        yield Fit(
            "low_precision_reduction", f"in {case.names[1]} {found.said}", found.rest, found.error, Claim(found.dtype)
        )
