"""The first operators at which two traces part, found by values.

A value of one side has a partner if the other side has the same value anywhere: as an input or output of an operator, as a value
that a fused operator would have in between, or as one of the parts into which such a value can be cut; or if all of its own parts
have partners. Names and numbers of operators are not
compared: eager and fused attention compute the same output by other values in between. So values without a partner are followed
back from a result that has none, through operators whose outputs have none, to the operators whose inputs all have partners.
Values without a partner that lead to equal results are another way of computing the same, and are not visited.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from crossframe.dtypes import FLOATING, unit_roundoff
from crossframe.operators.signature import Signature
from crossframe.operators.trace import Operator, Trace

Partner = Callable[[Signature], bool]
_NEIGHBOURS = 2


@dataclass(frozen=True)
class Neighbour:
    """An operator near the one that parts, and whether its output has a partner."""

    operator: Operator
    matched: bool


@dataclass(frozen=True)
class Finding:
    """The first operator of each side whose inputs have partners and whose output has none.

    Attributes:
        a, b: the operators; None where a side has none.
        from_outside: whether values that the traced part was given differ already, such as a table that numpy made. The operators
            are then the first that read one of them.
        factor: b's output as a multiple of a's, None where it is not one, or is the same.
        neighbours: of a and of b, in order.
        num_matched, num_operators: of a and of b.
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
        tolerance: on norm(x - y) / norm(x) of values that count as the same, in any order. None: bits must be equal, and in the
            same order, as of two runs of the same program.
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
    """Whether a value has a partner on the other side."""
    values = _values(other)
    if tolerance is None:
        exact = {_exact(value) for value in values}
        return lambda value: _exact(value) in exact
    by_size: dict[int, dict[str, Signature]] = {}
    parts = [part for value in values for cut in value.parts for part in cut]
    for each in (*values, *parts):
        by_size.setdefault(each.numel, {})[each.multiset] = each
    known: dict[tuple[int, str], bool] = {}

    def has_partner(value: Signature) -> bool:
        key = value.numel, value.multiset
        if key not in known:
            alike = by_size.get(value.numel, {})
            whole = value.multiset in alike or any(value.is_close(each, tolerance) for each in alike.values())
            known[key] = whole or any(all(map(has_partner, cut)) for cut in value.parts)
        return known[key]

    return has_partner


def _exact(value: Signature) -> tuple[object, str]:
    return value.shape, value.bits


def _in_any_order(value: Signature) -> tuple[object, str]:
    return value.numel, value.multiset


def _first(trace: Trace, partner: Partner, ordered: bool) -> tuple[Operator | None, bool]:
    """The first operator at which this side parts, and whether what parts is a value from outside of the trace: then the operator
    is the first one that reads such a value."""

    key = _exact if ordered else _in_any_order
    makers: dict[tuple[object, str], list[Operator]] = {}
    used = set()
    for op in trace.operators:
        made = {key(value) for value in op.outputs}
        for each in made:
            makers.setdefault(each, []).append(op)
        if not op.name.endswith("_like"):  # which reads no values
            used |= {key(value) for value in op.inputs} - made
    parted = [value for value in trace.results if not partner(value) and key(value) in makers]
    if not trace.results:
        # A part without modules, as the optimizer's step or a backward: what no operator reads. Second outputs serve backward.
        ends = [op.outputs[0] for op in trace.operators if op.outputs]
        parted = [value for value in ends if not partner(value) and key(value) not in used]
    stack = [op for value in parted for op in makers[key(value)][:1]]
    visited: set[int] = set()
    firsts: list[Operator] = []
    readers: list[Operator] = []
    while stack:
        op = stack.pop()
        if op.index in visited:
            continue
        visited.add(op.index)
        causes = [value for value in op.inputs if not partner(value)]
        # Equal values, as of masks, are made again and again: the last one before is the operator's own.
        inside = [earlier[-1] for value in causes if (earlier := _before(op, makers.get(key(value), ())))]
        stack += inside
        if len(inside) < len(causes):
            readers.append(op)
        if not causes:
            firsts.append(op)
    if not ordered:
        # Of two ways to compute the same, the values in between have no partners either.
        rejoined = _rejoined(trace, partner, key)
        firsts = [op for op in firsts if op.index not in rejoined] or firsts
    return min(firsts or readers, key=lambda op: op.index, default=None), not firsts and bool(readers)


def _rejoined(trace: Trace, partner: Partner, key: Callable[[Signature], tuple[object, str]]) -> set[int]:
    """Operators from whose outputs, none of which has a partner, a value that has one follows."""
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


def _before(op: Operator, makers: Sequence[Operator]) -> list[Operator]:
    return [made for made in makers if made.index < op.index]


def _factor(a: Operator, b: Operator, partners: tuple[Partner, Partner]) -> float | None:
    """What b's first output without a partner is a multiple of a's by."""
    ours = next((value for value in a.outputs if not partners[0](value)), None)
    theirs = next((value for value in b.outputs if not partners[1](value)), None)
    if ours is None or theirs is None or not ours.norm or not theirs.norm:
        return None
    units = [unit_roundoff(value.dtype) for value in (ours, theirs) if value.dtype in FLOATING]
    # One operator on each side, of a few roundings.
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
