"""Hypotheses about the contributions or pieces of individual ranks."""

import math
from collections.abc import Iterator

import numpy as np

from crossframe.recording.event_format import BACKWARD, NORM, PARAMETERS, REDUCE, STATE, UNSHARDED, UPDATE
from crossframe.verdict.diagnosis.case import Case
from crossframe.verdict.diagnosis.fit import Claim, Fit, accepted
from crossframe.verdict.diagnosis.rank_fits import absent_ranks, low_reduction, weighted_ranks
from crossframe.verdict.measure.metrics import distance, norm

SHARDED = (PARAMETERS, UNSHARDED, REDUCE, STATE, UPDATE)
"""Phases whose quantities are assembled from the pieces of ranks."""


def factor_of_ranks(case: Case) -> Iterator[Fit]:
    """The gradients of some ranks have another weight in the mean."""
    if case.phase != REDUCE or (grads := case.local_grads(case.wrong, case.name)) is None:
        return
    found = weighted_ranks(case.sides, [case.cut(grad) for grad in grads], case.reduce_roundoff)
    if found is not None:
        text = ", ".join(f"rank {rank} {found.times[rank]:.6g} times" for rank in found.ranks)
        claim = Claim(f"times of rank {found.ranks}", found.times[found.ranks[0]], found.uncertainty)
        yield Fit(
            "constant_factor",
            f"the mean of {case.names[1]} counts the gradients of {text}",
            found.residual,
            found.error,
            claim,
        )


def missing_rank(case: Case) -> Iterator[Fit]:
    """The contribution or piece of one or several ranks is missing."""
    if case.phase == NORM:
        yield from _norm_of_one(case)
    if case.phase == REDUCE and (grads := case.local_grads(case.wrong, case.name)) is not None:
        found = absent_ranks(case.sides, [case.cut(grad) for grad in grads], case.reduce_roundoff)
        if found is not None:
            divided = f"the sum of the others is divided by {found.divided_by:g}"
            text = (
                f"in {case.names[1]} the gradients of ranks {list(found.ranks)} of {len(grads)} are missing; {divided}"
            )
            yield Fit("missing_rank", text, found.residual, found.error, Claim(text))
    if case.phase in SHARDED and case.whole:
        yield from _missing_slice(case)
        yield from _missing_slice_of_unit(case)


def _missing_slice(case: Case) -> Iterator[Fit]:
    """The piece of one rank is zero or was not updated."""
    right, wrong = case.both.right.reshape(-1), case.both.wrong.reshape(-1)
    fills = {"zeros": np.zeros_like(wrong)}
    if case.phase in (UNSHARDED, UPDATE):
        before = case.before(case.wrong, case.step - (case.phase == UNSHARDED), case.name) if case.step else None
        if before is not None:
            fills["unchanged by the step"] = np.asarray(before, np.float64).reshape(-1)
    own = case.wrong.manifest.mesh.coordinate(case.quantity.rank)[1] if case.quantity.rank is not None else None
    for rank in range(case.wrong.manifest.mesh.shard):
        held = case.elements_of(rank)
        # A parameter that one rank owns entirely shows little, unless another rank gathered zeros for it.
        least_said = held.size == wrong.size and (case.phase != UNSHARDED or rank == own)
        if not norm(right[held]) or least_said:
            continue
        for text, fill in fills.items():
            predicted = right.copy()
            predicted[held] = fill[held]
            if accepted(residual := distance(wrong, predicted), case.both.difference, case.limit):
                whose = _global_rank(case, rank)
                evidence = (
                    f"the {held.size} elements of rank {whose} are {text} in {case.names[1]}, all others are right"
                )
                yield Fit("missing_rank", evidence, residual, 0.0, Claim(f"{rank} {text}"))


def _global_rank(case: Case, place: int) -> int:
    """The global rank of a shard rank in the replica of the quantity."""
    return case.replica_of(case.wrong) * case.wrong.manifest.mesh.shard + place


def _missing_slice_of_unit(case: Case) -> Iterator[Fit]:
    """A parameter on a single rank is zero, and so is everything else of its unit on this rank, but not on other ranks."""
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
        both = case.in_both(lambda side, name=name: case.read(side, case.phase, case.step, name, case.quantity.use))
        if both is None:
            return
        (wanted, found), held = (each.reshape(-1) for each in both), case.elements_of(ranks[0], name)
        if norm(found[held]):
            return
        parts["zeros"] += held.size
        parts["right"] += int(np.count_nonzero(wanted[held]))
        parts["elsewhere"] += int(np.count_nonzero(found))
    if parts["elsewhere"] and parts["right"] > right.size:
        whose = f"rank {_global_rank(case, ranks[0])} in {unit or 'the root unit'!r}"
        evidence = (
            f"all {parts['zeros']} elements of {whose} are zeros in {case.names[1]}, those of other ranks are not"
        )
        yield Fit("missing_rank", evidence, 0.0, 0.0, Claim(f"{ranks[0]} zeros"))


def _norm_of_one(case: Case) -> Iterator[Fit]:
    """The norm is over the shards of a single rank, or over those of all other ranks."""
    manifest, squares = case.wrong.manifest, np.zeros(case.wrong.manifest.mesh.shard)
    for name in manifest.params:
        for part in case.wrong.ranges(REDUCE, case.step, name):
            if part.rank < squares.size:
                if part.sketch is not None:
                    return
                squares[part.rank] += norm(case.wrong.elements(case.step, part)) ** 2
    if squares.size < 2:
        return
    for rank in range(squares.size):
        for text, square in (("alone", squares[rank]), ("left out", squares.sum() - squares[rank])):
            predicted = np.array([math.sqrt(square)])
            tolerance = case.limit + 4 * case.compute_roundoff * math.sqrt(square)
            if accepted(residual := case.both.residual(predicted), case.both.difference, tolerance):
                evidence = f"the norm in {case.names[1]} is over the shards with those of rank {rank} {text}"
                yield Fit("missing_rank", evidence, residual)


def low_precision_reduction(case: Case) -> Iterator[Fit]:
    """Gradients were reduced in a coarser dtype, or those of microbatches were added up in the coarser dtype of the reduction."""
    if case.phase == BACKWARD:
        yield from _accumulated_low(case)
    if case.phase != REDUCE:
        return
    grads = case.local_grads(case.wrong, case.name)
    cut = None if grads is None else [case.cut(grad) for grad in grads]
    mesh, microbatches = case.wrong.manifest.mesh, case.wrong.num_microbatches
    if found := low_reduction(case.sides, cut, mesh.world_size, case.reduce_roundoff, mesh.replicate, microbatches):
        yield Fit(
            "low_precision_reduction",
            f"in {case.names[1]} {found.text}",
            found.residual,
            found.error,
            Claim(found.dtype),
        )


def _accumulated_low(case: Case) -> Iterator[Fit]:
    """A local gradient is stored in a coarser dtype than the run computes in, or has values of the reduction's dtype."""
    known = case.wrong.manifest.settings.get("reduce_dtype"), case.quantity.dtypes[not case.swapped]
    low = low_reduction(case.sides, None, 1, case.compute_roundoff, 1, case.wrong.num_microbatches)
    if low is not None and low.dtype in known:
        text = f"in {case.names[1]} all elements of the local gradient are {low.dtype} values, but it computes in "
        text += case.wrong.manifest.dtype
        yield Fit("low_precision_reduction", text, low.residual, low.error, Claim(low.dtype))


ALL = (missing_rank, low_precision_reduction, factor_of_ranks)
