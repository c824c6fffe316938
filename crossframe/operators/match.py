"""Finds the first operators at which two traces differ, by comparing values.

A value of one trace has a partner if the other trace has the same value anywhere: as an input or output of an operator, as an
intermediate value of a fused operator, or as one of the parts into which such a value can be cut. It also has one if all of its
own parts have partners. Names and numbers of operators are not compared, since eager and fused attention compute the same output
by different intermediate values. The search starts at results without a partner and follows values without a partner back to the
operators whose inputs all have partners. Values without a partner that lead to equal results belong to another way to compute
the same result, and are not visited.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from crossframe.dtypes import FLOATING, unit_roundoff
from crossframe.operators.signature import Signature
from crossframe.operators.trace import Operator, Trace

Partner = Callable[[Signature], bool]
_NEIGHBOURS = 2


@dataclass(frozen=True)
class Neighbour:
    """An operator near the first one that differs, and whether its outputs have partners."""

    operator: Operator
    matched: bool


@dataclass(frozen=True)
class Finding:
    """The first operator of each trace whose inputs have partners and whose output has none.

    Attributes:
        a, b: the operators; None if a trace has none.
        from_outside: whether inputs of the traced part differ already, such as a table that numpy computed. The operators are
            then the first that read such an input.
        factor: b's output as a multiple of a's; None if it is equal or not a multiple.
        neighbours: operators near a and near b, in order.
        num_matched: number of operators of each trace whose outputs have partners.
        num_operators: number of operators of each trace.
    """

    a: Operator | None
    b: Operator | None
    from_outside: bool
    factor: float | None
    neighbours: tuple[tuple[Neighbour, ...], tuple[Neighbour, ...]]
    num_matched: tuple[int, int]
    num_operators: tuple[int, int]


def find(a: Trace, b: Trace, tolerance: float | None) -> Finding:
    """Compare two traces of the same part of the same step.

    Args:
        tolerance: maximum norm(x - y) / norm(x) of values that count as equal, in any order of elements. None: values must be
            equal bit for bit and in the same order, as in two runs of the same program.
    """
    partners = (_partner(b, tolerance), _partner(a, tolerance))
    firsts = [_first(trace, partner, tolerance is None) for trace, partner in zip((a, b), partners, strict=True)]
    matched = [
        [all(map(partner, op.outputs)) for op in trace.operators]
        for trace, partner in zip((a, b), partners, strict=True)
    ]
    ours, theirs = firsts[0][0], firsts[1][0]
    return Finding(
        ours,
        theirs,
        any(outside for _, outside in firsts) and all(outside or op is None for op, outside in firsts),
        _factor(ours, theirs, partners) if ours is not None and theirs is not None else None,
        (_around(a, ours, matched[0]), _around(b, theirs, matched[1])),
        (sum(matched[0]), sum(matched[1])),
        (len(a.operators), len(b.operators)),
    )


def _values(trace: Trace) -> Sequence[Signature]:
    return [value for op in trace.operators for value in (*op.inputs, *op.outputs, *op.interior)]


def _partner(other: Trace, tolerance: float | None) -> Partner:
    """A function that tells whether a value has a partner in the other trace."""
    values = _values(other)
    if tolerance is None:
        exact = {_exact(value) for value in values}
        return lambda value: _exact(value) in exact
    by_size: dict[int, dict[str, Signature]] = {}
    parts = [part for value in values for cut in value.parts for part in cut]
    for each in (*values, *parts):
        by_size.setdefault(each.numel, {})[each.multiset] = each
    by_norm = {numel: sorted(alike.values(), key=lambda each: each.norm) for numel, alike in by_size.items()}
    norms = {numel: [each.norm for each in alike] for numel, alike in by_norm.items()}
    known: dict[tuple[int, str], bool] = {}

    def has_partner(value: Signature) -> bool:
        key = value.numel, value.multiset
        if key not in known:
            whole = value.multiset in by_size.get(value.numel, {}) or any(
                value.is_close(each, tolerance) for each in of_norm(value.norm, value.numel)
            )
            known[key] = whole or any(all(map(has_partner, cut)) for cut in value.parts)
        return known[key]

    def of_norm(norm: float, numel: int) -> Sequence[Signature]:
        near = norms.get(numel, [])
        least, most = _norms_close_to(norm, tolerance)
        return by_norm.get(numel, [])[bisect_left(near, least) : bisect_right(near, most)]

    return has_partner


def _norms_close_to(norm: float, tolerance: float) -> tuple[float, float]:
    """The least and the largest norm of the values that may be close to one with this norm (`Signature.is_close`).

    Norms differ by at most the distance. A sketch estimates distance^2 with a standard deviation of sqrt(2 / NUM_SUMS) = 8.8 % of
    it, so the estimate is below half of the distance only 8 standard deviations from its mean. Sums are stored in float32, which
    moves them by less than 1e-6 of the norm.

    >>> [float(f"{norm:.4g}") for norm in _norms_close_to(10.0, 0.1)]
    [8.0, 12.5]
    """
    apart = 2 * tolerance + 1e-6
    return (norm * (1 - apart), norm / (1 - apart)) if apart < 1 else (0.0, math.inf)


def _exact(value: Signature) -> tuple[object, str]:
    return value.shape, value.bits


def _in_any_order(value: Signature) -> tuple[object, str]:
    return value.numel, value.multiset


def _first(trace: Trace, partner: Partner, ordered: bool) -> tuple[Operator | None, bool]:
    """The first operator of this trace that differs.

    Returns:
        The operator, and whether the difference comes from outside of the trace. If so, the operator is the first that reads a
        value that differs.
    """

    key = _exact if ordered else _in_any_order
    makers: dict[tuple[object, str], list[Operator]] = {}
    used = set()
    for op in trace.operators:
        made = {key(value) for value in op.outputs}
        for each in made:
            makers.setdefault(each, []).append(op)
        if not op.name.endswith("_like"):  # these read no values
            used |= {key(value) for value in op.inputs} - made
    parted = [value for value in trace.results if not partner(value) and key(value) in makers]
    if not trace.results:
        # A part without modules, such as the optimizer's step or a backward, has as results the first outputs that no operator
        # reads. Further outputs are for the backward.
        ends = [op.outputs[0] for op in trace.operators if op.outputs]
        parted = [value for value in ends if not partner(value) and key(value) not in used]
    involved = {makers[key(value)][0].index for value in parted}
    firsts: list[Operator] = []
    readers: list[Operator] = []
    for op in reversed(trace.operators):
        if op.index not in involved:
            continue
        causes = [value for value in op.inputs if not partner(value)]
        # Equal values, such as masks, may have several makers: the operator reads that of the last one before it.
        earlier = (_last_before(op, makers.get(key(value), ())) for value in causes)
        inside = [made for made in earlier if made is not None]
        involved.update(made.index for made in inside)
        if len(inside) < len(causes):
            readers.append(op)
        if not causes:
            firsts.append(op)
    if not ordered:
        # Intermediate values of another way to compute the same result have no partners either.
        rejoined = _rejoined(trace, partner, key)
        firsts = [op for op in firsts if op.index not in rejoined] or firsts
    return min(firsts or readers, key=lambda op: op.index, default=None), not firsts and bool(readers)


def _rejoined(trace: Trace, partner: Partner, key: Callable[[Signature], tuple[object, str]]) -> set[int]:
    """Indices of operators whose outputs have no partner but lead to a value that has one."""
    readers: dict[tuple[object, str], list[Operator]] = {}
    found: set[int] = set()
    for op in reversed(trace.operators):
        for reader in (each for value in op.outputs if not partner(value) for each in readers.get(key(value), ())):
            agrees = any(value.dtype in FLOATING and value.numel > 1 and partner(value) for value in reader.outputs[:1])
            if agrees or reader.index in found:
                found.add(op.index)
                break
        for value in op.inputs:
            readers.setdefault(key(value), []).append(op)
    return found


def _last_before(op: Operator, makers: Sequence[Operator]) -> Operator | None:
    """The last of these operators, which are in order, before another one."""
    place = bisect_left(makers, op.index, key=lambda made: made.index)
    return makers[place - 1] if place else None


def _factor(a: Operator, b: Operator, partners: tuple[Partner, Partner]) -> float | None:
    """The factor between the first outputs of a and b without a partner; None if they are equal or not multiples."""
    ours = next((value for value in a.outputs if not partners[0](value)), None)
    theirs = next((value for value in b.outputs if not partners[1](value)), None)
    if ours is None or theirs is None or not ours.norm or not theirs.norm:
        return None
    units = [unit_roundoff(value.dtype) for value in (ours, theirs) if value.dtype in FLOATING]
    # Each is the result of one operator, with a few roundings.
    tolerance = 8 * sum(units)
    if not units or not ours.is_multiple(theirs, tolerance):
        return None
    factor = theirs.norm / ours.norm
    return factor if abs(factor - 1) > tolerance else None


def _around(trace: Trace, op: Operator | None, matched: list[bool]) -> tuple[Neighbour, ...]:
    if op is None:
        return ()
    near = range(max(0, op.index - _NEIGHBOURS), min(len(trace.operators), op.index + _NEIGHBOURS + 1))
    return tuple(Neighbour(trace.operators[i], matched[i]) for i in near)
