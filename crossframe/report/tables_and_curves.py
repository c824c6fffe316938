"""Summarises judged quantities as curves over steps, a map of units and steps, and a table of phases."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from crossframe.verdict.result import Judged

T = TypeVar("T")
MOST_ROWS, MOST_COLUMNS = 40, 60


@dataclass(frozen=True)
class Worst:
    """Summary of some quantities by their largest fraction of a bound.

    Attributes:
        num: number of quantities.
        num_equal, num_beyond: how many are equal bit for bit, and how many exceed their rounding bound.
        used: the largest ratio of a difference to its rounding bound; None if no quantity has a bound.
        name: the quantity with that ratio.
    """

    num: int
    num_equal: int
    num_beyond: int
    used: float | None
    name: str

    @classmethod
    def of(cls, judged: Iterable[Judged]) -> "Worst":
        """Summarise at least one quantity."""
        every = list(judged)
        worst = max(every, key=lambda one: (one.beyond, -1.0 if one.used is None else one.used))
        used = [one.used for one in every if one.used is not None]
        return cls(
            len(every),
            sum(one.equal for one in every),
            sum(one.beyond for one in every),
            max(used, default=None),
            worst.name,
        )


def first_beyond(judged: Sequence[Judged]) -> Judged | None:
    """The first quantity that exceeds its bound."""
    return next((one for one in judged if one.beyond), None)


def phases(judged: Sequence[Judged]) -> dict[str, Worst]:
    """The summary of each phase, in the order of the comparison."""
    found: dict[str, list[Judged]] = {}
    for one in judged:
        found.setdefault(one.phase, []).append(one)
    return {phase: Worst.of(some) for phase, some in found.items()}


def curves(judged: Sequence[Judged]) -> dict[str, tuple[tuple[int, float], ...]]:
    """(step, largest `used`) pairs by phase. Phases without bounds, and phases that only move data and did so correctly, are
    omitted."""
    found: dict[str, dict[int, float]] = {}
    for one in judged:
        if one.used is not None:
            steps = found.setdefault(one.phase, {})
            steps[one.step] = max(steps.get(one.step, 0.0), one.used)
    return {phase: tuple(steps.items()) for phase, steps in found.items() if any(steps.values())}


@dataclass(frozen=True)
class HeatMap:
    """Units over steps.

    Attributes:
        rows: the units of each row: one, or neighbours together.
        columns: the steps of each column: one, or neighbours together.
        cells: (row, column) -> the worst there; nothing was compared where there is none.
        first: the cell of the first difference; None if there is none.
    """

    rows: tuple[tuple[str, ...], ...]
    columns: tuple[tuple[int, ...], ...]
    cells: dict[tuple[int, int], Worst]
    first: tuple[int, int] | None


def heat_map(judged: Sequence[Judged], units: Sequence[str], parted: Judged | None = None) -> HeatMap:
    """The summary of each unit at each step.

    Args:
        units: in the order of forward; a unit of several buckets may stand there several times.
        parted: the entry of the first difference; None: the first quantity that exceeds its bound.

    Steps with only a recorded loss are omitted, unless it exceeds its bound or is the first difference, or there are no other
    steps. If there are too many units or steps, neighbours share a row or a column.
    """
    names = list(dict.fromkeys([*units, *(one.unit for one in judged)]))
    telling = {one.step for one in judged if one.event != "loss" or one.beyond or one is parted}
    steps = sorted(telling or {one.step for one in judged})
    rows, columns = _together(names, MOST_ROWS), _together(steps, MOST_COLUMNS)
    row_of = {name: i for i, row in enumerate(rows) for name in row}
    column_of = {step: i for i, column in enumerate(columns) for step in column}
    found: dict[tuple[int, int], list[Judged]] = {}
    for one in judged:
        if one.step in column_of:
            found.setdefault((row_of[one.unit], column_of[one.step]), []).append(one)
    first = parted or first_beyond(judged)
    return HeatMap(
        rows,
        columns,
        {at: Worst.of(some) for at, some in found.items()},
        (row_of[first.unit], column_of[first.step]) if first else None,
    )


def _together(things: Sequence[T], most: int) -> tuple[tuple[T, ...], ...]:
    size = max(1, math.ceil(len(things) / most))
    return tuple(tuple(things[i : i + size]) for i in range(0, len(things), size))


# A cell's class is a letter and a number, and each has a colour. The number is an upper limit of difference / rounding bound:
# "in" 0.01, 0.1 and 1, "out" 10, 1000, a million, and more.
INSIDE, OUTSIDE = (0.01, 0.1, math.inf), (10.0, 1e3, 1e6, math.inf)


def level(worst: Worst) -> str:
    """The class of a cell.

    >>> level(Worst(2, 2, 0, 0.0, "w")), level(Worst(2, 1, 0, 0.02, "w")), level(Worst(2, 1, 1, math.inf, "w"))
    ('in0', 'in2', 'out4')
    >>> level(Worst(2, 1, 0, None, "w"))
    'free'
    """
    if worst.num_beyond:
        used = math.inf if worst.used is None else worst.used
        return f"out{1 + next(i for i, most in enumerate(OUTSIDE) if used <= most)}"
    if worst.num_equal == worst.num:
        return "in0"
    if worst.used is None:
        return "free"
    return f"in{1 + next(i for i, most in enumerate(INSIDE) if worst.used <= most)}"
