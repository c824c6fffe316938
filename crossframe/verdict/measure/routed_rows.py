"""Puts the rows of an expert's activations into one order.

A router gives an expert some of the rows that the module around it has, one for each token. Two implementations gather them in
other orders, such as that of a mask or of a sort, and the expert computes each row alone. So between two implementations the rows
that the expert received are matched by their values, and its activations and those of modules inside of it are compared in this
order. Rows are reordered only if all of these hold:

- Other modules have another number of rows of the same width. If these are not of the same kind, as other experts are, the rows
  must not be the samples of the rank, whose order is known.
- Rows at other places are unrelated in place. Two rows that are drawn independently from rows with the mean square distance s^2
  from their mean have a mean square distance of 2 s^2; a row and itself with other rounding have one near 0. The threshold is
  half: a mean square distance of at least s^2 over all rows that move.
- Each row has a row of its own on the other side within the bound, and nearer than s / 2, less than half of the distance
  sqrt(2) s of unrelated rows. All rows together are then within the bound.

More than `MOST_ROWS` rows are not matched: then an activation is not compared if its columns are equal but for the order of their
elements.

A fault in an expert leaves the rows that it receives as they are, so it is found where it is. Two recordings of one
implementation are never reordered.
"""

import math
from collections.abc import Iterator

import numpy as np

from crossframe.alignment.module_names import enclosing, kind_of
from crossframe.recording.event_format import INPUT, OUTPUT
from crossframe.recording.module_calls import called_module
from crossframe.verdict.measure.aligned_samples import At
from crossframe.verdict.measure.metrics import distance, norm
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.measure.values import Sides, activation_values

MOST_ROWS = 2048
"""The largest number of rows that are matched: the time grows with its square, to about a second."""


class RoutedRows:
    """The orders of rows of the experts of two implementations at one step."""

    def __init__(self, pair: Pair, step: int) -> None:
        self._pair, self._step = pair, step
        self._recorded = set(pair.a.activations(step)) & set(pair.b.activations(step)) if pair.two_programs else set()
        self._microbatches = 1 + max((at[0] for at in self._recorded), default=0)
        # By microbatch and rank, then by width and number of rows: the kinds of modules.
        self._kinds: dict[tuple[int, int], dict[int, dict[int, set[str]]]] = {}
        self._orders: dict[tuple[int, int, str, str], np.ndarray | None] = {}

    def in_one_order(self, at: At, rank: int, sides: Sides) -> Sides | None:
        """The values of an activation on a rank, those of b in the order of the rows of a; None if it has more than `MOST_ROWS`
        rows, whose columns are equal but for the order of their elements."""
        a, b, sketches = sides
        if not self._recorded or sketches is not None or a.ndim != 2 or a.shape != b.shape:
            return sides
        routed = list(self._routed(at, rank, len(a)))
        if len(a) > MOST_ROWS:
            return None if routed and may_be_reordered(a, b, self._pair.bounds.parameter) else sides
        for place in routed:
            if (order := self._order(at[0], rank, place)) is not None:
                if (order == np.arange(len(order))).all():
                    break
                self._pair.routed.setdefault(place[0], self._step)
                return a, b[order], None
        return sides

    def _routed(self, at: At, rank: int, num_rows: int) -> Iterator[tuple[str, str]]:
        """The routed modules around a module, or this one, that get as many rows, with INPUT, or OUTPUT if that is not recorded.

        The outermost comes first: a fault inside of it does not change its input.
        """
        microbatch, module, _ = at
        is_first = called_module(module) == module  # which calls of other modules are around a further one is not known
        around = [*dict.fromkeys(("", *reversed(list(enclosing(module))), module))] if is_first else [module]
        for each in around:
            use = next((use for use in (INPUT, OUTPUT) if (microbatch, each, use) in self._recorded), None)
            if use is None:
                continue
            shape = self._shape(rank, (microbatch, each, use))
            if len(shape) == 2 and shape[0] == num_rows and self._is_routed((microbatch, each, use), rank, shape):
                yield each, use

    def _order(self, microbatch: int, rank: int, place: tuple[str, str]) -> np.ndarray | None:
        """The order of b's rows of a routed module; None if there is none."""
        key = (microbatch, rank, *place)
        if key not in self._orders:
            self._orders[key] = self._matched(*key)
        return self._orders[key]

    def _is_routed(self, at: At, rank: int, shape: tuple[int, ...]) -> bool:
        """Whether other modules of the same kind have another number of rows of this width, or any other module, and its rows are
        not the samples of a rank or microbatch."""
        microbatch, module, _ = at
        if (microbatch, rank) not in self._kinds:
            self._kinds[microbatch, rank] = kinds = {}
            for other in (each for each in self._recorded if each[0] == microbatch):
                own = self._shape(rank, other)
                if len(own) > 1:
                    kinds.setdefault(own[-1], {}).setdefault(math.prod(own[:-1]), set()).add(kind_of(other[1]))
        others = [
            kind
            for rows, found in self._kinds[microbatch, rank][shape[-1]].items()
            if rows != shape[0]
            for kind in found
        ]
        samples = len(self._pair.a.batch(self._step, rank).sample_ids)
        return kind_of(module) in others or (bool(others) and shape[0] not in (samples, samples // self._microbatches))

    def _shape(self, rank: int, at: At) -> tuple[int, ...]:
        return self._pair.a.activation_shape(self._step, rank, *at)

    def _matched(self, microbatch: int, rank: int, module: str, use: str) -> np.ndarray | None:
        at = (microbatch, module, use)
        sides = [
            activation_values(recording, self._step, rank, at).elements for recording in (self._pair.a, self._pair.b)
        ]
        a, b = sides
        if a is None or b is None or a.shape != b.shape:
            return None
        return matching_rows(a, b, self._pair.bounds.parameter)


def matching_rows(a: np.ndarray, b: np.ndarray, bound: float, *, are_known: bool = False) -> np.ndarray | None:
    """The order of b's rows in which they equal a's up to `bound` (see above); None if there is none.

    >>> matching_rows(np.eye(3), np.eye(3)[[2, 0, 1]], 1e-11).tolist()
    [1, 2, 0]

    Args:
        a, b: arrays of one shape (rows, width).
        bound: on norm(a - b) / norm(a).
        are_known: whether rows are known to come in other orders, and so may be as near to those in their places as they like.
    """
    a, b = a.astype(np.float64), b.astype(np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()) or not a.any():
        return None
    num_rows, size = len(a), norm(a)
    if distance(a, b) <= bound * size:
        return np.arange(num_rows)
    order = _assigned(a, b, min(bound * size / np.sqrt(num_rows), _spread(a) / 2))
    if order is None or are_known:
        return order
    return order if _are_unrelated(a, b, order != np.arange(num_rows)) else None


def _spread(a: np.ndarray) -> float:
    """The root mean square distance of rows from their mean."""
    return norm(a - a.mean(axis=0)) / np.sqrt(len(a))


def _are_unrelated(a: np.ndarray, b: np.ndarray, moved: np.ndarray) -> bool:
    """Whether the rows that move are as far from those in their places as two rows that are drawn independently."""
    return distance(a[moved], b[moved]) >= _spread(a) * np.sqrt(moved.sum())


def may_be_reordered(a: np.ndarray, b: np.ndarray, bound: float) -> bool:
    """Whether rows that are unrelated in place may be equal up to `bound` in another order.

    Of two lists of numbers, the sorted ones are at most as far apart as any orders of them, so norm(a - b) in any order of b's
    rows is at least that of the sorted columns. A fault that changes values changes these.
    """
    a, b = a.astype(np.float64), b.astype(np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()) or distance(a, b) <= bound * norm(a):
        return False
    moved = np.linalg.norm(a - b, axis=1) > bound * norm(a) / np.sqrt(len(a))
    same_columns = distance(np.sort(a, axis=0), np.sort(b, axis=0)) <= bound * norm(a)
    return same_columns and _are_unrelated(a, b, moved)


def _assigned(a: np.ndarray, b: np.ndarray, most: float) -> np.ndarray | None:
    """For each row of a one of b within a distance, a different one for each, the same row if it is; None if there are none."""
    near = [np.array([i]) if distance(x, y) <= most else None for i, (x, y) in enumerate(zip(a, b, strict=True))]
    squares = np.square(a).sum(axis=1)[:, None] + np.square(b).sum(axis=1) - 2 * (a @ b.T)
    owner = np.full(len(b), -1)
    for i, own in enumerate(near):
        if own is not None:
            owner[i] = i

    def rows_near(i: int) -> np.ndarray:
        """The rows of b within the distance, the nearest first."""
        # Differences of squares are too inexact to decide, and are only used to leave out most rows.
        some = np.flatnonzero(squares[i] <= most**2 + 1e-10 * np.vdot(a[i], a[i]))
        apart = np.linalg.norm(b[some] - a[i], axis=1)
        return some[np.argsort(apart)][: (apart <= most).sum()]

    known: dict[int, np.ndarray] = {}

    def place(start: int) -> bool:
        """Give a row one of b's, moving others to rows that are equally near where it has to (Kuhn's algorithm)."""
        seen: set[int] = set()
        path = [start]  # each row but the first has the row of b that the one before it is to get
        while path:
            if path[-1] not in known:
                known[path[-1]] = rows_near(path[-1])
            options = [j for j in known[path[-1]].tolist() if j not in seen]
            free = next((j for j in options if owner[j] < 0), None)
            if free is not None:
                for i in reversed(path):
                    held = np.flatnonzero(owner == i)
                    owner[free] = i
                    free = int(held[0]) if held.size else -1
                return True
            if options:
                seen.add(options[0])
                path.append(int(owner[options[0]]))
            else:
                path.pop()
        return False

    for i, own in enumerate(near):
        if own is None and not place(i):
            return None
    order = np.empty(len(a), int)
    order[owner] = np.arange(len(b))
    return order
