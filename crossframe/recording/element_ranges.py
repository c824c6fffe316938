"""The elements of parameters that each rank recorded at a step, and sums of the sketches of all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from crossframe.recording import event_format
from crossframe.recording.event_index import StepLines
from crossframe.recording.sketch import ROW, Sketch

What = tuple[str, str, str]
"""Phase, parameter and entry of the optimizer state."""


@dataclass(frozen=True)
class ElementRange:
    """A range of elements of one parameter that one rank recorded.

    Attributes:
        key: the key of its elements in the step's file, or in that of the previous step if `before`.
        sketch: the row of its sketch, or up to format 4 an object (see `crossframe.recording.event_format`); None if the
            elements were recorded.
        sample: the range of its sample among those of the step's file.
    """

    rank: int
    start: int
    stop: int
    dtype: str
    key: str
    sketch: dict[str, Any] | int | None = None
    before: bool = False
    sample: tuple[int, int] | None = None


class StepRanges:
    """The ranges of all ranks. Steps of equal structure share one object.

    Attributes:
        of: the ranges of each quantity, in rank order.
        slots: names of the optimizer state entries of each parameter, sorted.
        counted: the first rank that counts the optimizer's steps, by parameter.
        whole: the ranges of one replica, by quantity and replica, once they were checked to be the whole parameter.
    """

    def __init__(self, ranks: Sequence[StepLines]) -> None:
        self.of: dict[What, list[ElementRange]] = {}
        self.counted: dict[str, int] = {}
        slots: dict[str, set[str]] = {}
        for rank, own in enumerate(ranks):
            for name in own.counted:
                self.counted.setdefault(name, rank)
            for what, line in own.tensors.items():
                key = line.get("at", event_format.tensor_key(*what))
                sample = tuple(line["sample"]) if "sample" in line else None
                part = ElementRange(
                    rank,
                    line["start"],
                    line["stop"],
                    line["dtype"],
                    key,
                    line.get("sketch"),
                    line.get("before", False),
                    sample,
                )
                self.of.setdefault(what, []).append(part)
                if what[0] == event_format.STATE:
                    slots.setdefault(what[1], set()).add(what[2])
        self.slots = {name: tuple(sorted(each)) for name, each in slots.items()}
        self.whole: dict[tuple[What, int], list[ElementRange]] = {}
        self._sums: dict[range, _Sums] = {}

    def sums(self, group: range) -> "_Sums":
        """The rows to add over a group of ranks."""
        if group not in self._sums:
            self._sums[group] = _Sums(self.of, group)
        return self._sums[group]


class _Sums:
    """The rows of each rank whose sum is the sketch of each quantity."""

    def __init__(self, of: dict[What, list[ElementRange]], group: range) -> None:
        self.numels: list[int] = []
        self.places: dict[What, int] = {}
        rows: dict[int, tuple[list[int], list[int]]] = {}
        for what, ranges in of.items():
            own = [part for part in ranges if part.rank in group]
            if not all(type(part.sketch) is int for part in own):
                continue
            self.places[what] = place = len(self.places)
            self.numels.append(sum(part.stop - part.start for part in own))
            for part in own:
                to, of_rank = rows.setdefault(part.rank, ([], []))
                to.append(place)
                of_rank.append(part.sketch)  # type: ignore[arg-type]
        self.rows = {rank: (np.array(to), np.array(of_rank)) for rank, (to, of_rank) in rows.items()}


class SummedSketches:
    """The sketches of all quantities of a step, each the sum over the ranks of one replica."""

    def __init__(self, sums: _Sums, rows: dict[int, np.ndarray]) -> None:
        """`rows` are the rows in the file of each rank."""
        self._sums = sums
        count, width = len(sums.places), max((each.shape[1] for each in rows.values()), default=ROW)
        self._totals, self._wholes = np.zeros((count, width - 2)), np.zeros((count, 2), np.uint64)
        for rank, (to, of_rank) in sums.rows.items():
            taken = rows[rank][of_rank]
            self._totals[to] += taken[:, :-2]
            self._wholes[to] += np.ascontiguousarray(taken[:, -2:]).view(np.uint64)

    def sketch(self, what: What, dtype: str, seed: str) -> Sketch:
        """The sketch of one quantity."""
        place = self._sums.places[what]
        total, (fingerprint, lost) = self._totals[place], self._wholes[place].tolist()
        numel = self._sums.numels[place]
        return Sketch(numel, dtype, fingerprint, total[:-1], float(total[-1]), lost, seed)
