"""Matching: the state of an alignment of two models, that is their arrays and the entries that are decided so far."""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np

from crossframe.alignment.portions import indexed_text
from crossframe.alignment.slices import axis_signatures
from crossframe.alignment.solve import same_bits
from crossframe.alignment.stacks import Slice, slices_of
from crossframe.alignment.summary import Summary, varies
from crossframe.errors import MappingError
from crossframe.param_map import MapEntry
from crossframe.rearrange import Rearrangement
from crossframe.recording.hashing import element_hashes

Arrays = Mapping[str, Any]
"""numpy arrays by name; or a `Summary` for each, if a recording has one of them as a sketch."""
VALUES, GRADIENTS, MODULES, USE, SIMILAR, NAMES = "values", "gradients", "modules", "use", "similar", "names"
SAMPLES = "samples"
"""The values of a sample and their places, and a signature of all values in any order."""
NEAR, FAR = 0.01, 0.5
"""Gradients of one parameter differ by rounding, those of two by about their norms. Relative distances below the first one and
above the second one decide."""
_MOST_ELEMENTS = 1 << 16
"""Parameters of at most this size, such as biases, are joined element by element."""


class Matching:
    """Two models, and what is known of which parameters belong together.

    Attributes:
        first: values by name. second: values by path; stacked arrays are replaced by their slices.
        gradients: of both models, by name and by path, those of a golden as summaries; parameters may be missing.
        may_differ: whether a fault may have changed the gradients.
        entries: the decided ones, by name. evidence: what decided each. owners: the names that consist of each path.
        places: of both models, the place of each module in the order of use.
        slices: where each slice lies in an array of the second model.
        open_varied: of both models, the parameters with several values that have no counterpart.
        summarized: whether there are summaries instead of arrays.
        same: names of parameters that have the same name in both models, and are those of no other name.
    """

    def __init__(
        self,
        first: Arrays,
        second: Arrays,
        gradients: tuple[Arrays, Arrays],
        *,
        may_differ: bool,
        uses: tuple[Sequence[str], Sequence[str]],
        same: Set[str],
    ) -> None:
        self.first: Arrays = first
        self.second: Arrays = second
        self.gradients, self.may_differ, self.same = gradients, may_differ, same
        self.summarized = isinstance(next(iter(first.values())), Summary)
        self.entries: dict[str, MapEntry] = {}
        self.evidence: dict[str, str] = {}
        self.owners: dict[str, tuple[str, ...]] = {}
        self.places = tuple({module: place for place, module in enumerate(modules)} for modules in uses)
        self._known: dict[tuple[int, str], dict[tuple[int, ...], np.ndarray]] = {}
        self.slices: dict[str, Slice] = {}
        self.open_varied: tuple[list[str], ...] = ()  # parameters with several values that have no counterpart

    def groups(self) -> list[tuple[list[str], list[str]]]:
        """The open names and paths of parameters with the same elements."""
        groups: dict[tuple[int, int, str], tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
        for i, names in enumerate((self.open_names(), self.open_paths())):
            for name in names:
                size = self.sides()[i][name].size
                groups[self.signature(i, name), size, name if name in self.same else ""][i].append(name)
        return [(names, paths) for names, paths in groups.values() if names and paths]

    def unstack(self) -> None:
        """Replace arrays of stacked parameters by their slices, and these by theirs."""
        while True:
            signatures = [{name: self.signatures(i, name) for name in side} for i, side in enumerate(self.sides())]
            found = slices_of(self.first, self.second, *signatures)
            if not found:
                return
            stacked = {each.path for each in found.values()}
            self.second, gradients = (
                {path: array for path, array in side.items() if path not in stacked}
                | {name: each.of(side[each.path]) for name, each in found.items() if each.path in side}
                for side in (self.second, self.gradients[1])
            )
            self.gradients = self.gradients[0], gradients
            for name, each in found.items():
                outer = self.slices.get(each.path)
                self.slices[name] = each.inside(outer, self.second[name].ndim + 1) if outer else each

    def sides(self) -> tuple[Arrays, Arrays]:
        return self.first, self.second

    def stated(self, entry: MapEntry) -> MapEntry:
        """An entry with the paths of the model instead of slices."""
        if not (slices := [self.slices[path] for path in entry.paths if path in self.slices]):
            return entry
        paths = tuple(each.path for each in slices)
        num_dims = self.second[entry.paths[0]].ndim
        return replace(
            entry,
            path=paths if isinstance(entry.path, tuple) else paths[0],
            pattern=indexed_text(entry.pattern, num_dims, slices[0].indices),
        )

    def signatures(self, side: int, name: str) -> dict[tuple[int, ...], np.ndarray]:
        """The signatures of the slices of a parameter along each set of its axes; () for the whole."""
        if (side, name) not in self._known:
            array = self.sides()[side][name]
            hashes = element_hashes(array)
            most = array.ndim if array.size <= _MOST_ELEMENTS else array.ndim - 1
            sets = (axes for count in range(most + 1) for axes in itertools.combinations(range(array.ndim), count))
            self._known[side, name] = {axes: axis_signatures(hashes, axes) for axes in sets}
        return self._known[side, name]

    def signature(self, side: int, name: str) -> int:
        if self.summarized:
            return self.sides()[side][name].signature
        return int(self.signatures(side, name)[()][0])

    def add(self, entry: MapEntry, evidence: str) -> None:
        self.entries[entry.name], self.evidence[entry.name] = entry, evidence
        for path in entry.paths:
            self.owners[path] = (*self.owners.get(path, ()), entry.name)

    def add_verified(self, entries: Sequence[MapEntry], evidence: str = VALUES) -> bool:
        """Add entries if all their values agree; of summaries those with one value, which is known to be the same."""
        for entry in [] if self.summarized else entries:
            if not self.fits_shape(entry):
                return False
            wanted, made = self.first[entry.name], entry.to_canonical(*(self.second[path] for path in entry.paths))
            if entry.pattern:
                form = Rearrangement(entry.pattern)
                made, wanted = form.unpadded(made), form.unpadded(wanted)
            if not same_bits(wanted, made):
                return False
        for entry in entries:
            self.add(entry, evidence)
        return True

    def fits(self, entry: MapEntry) -> bool:
        """Whether shapes fit, and gradients, if there are any."""
        name, (ours, theirs) = entry.name, self.gradients
        if not self.fits_shape(entry):
            return False
        if self.may_differ or self.summarized or name not in ours or not theirs.keys() >= set(entry.paths):
            return True
        made = entry.to_canonical(*(theirs[path] for path in entry.paths))
        return not relative_distance(ours[name], made) > NEAR

    def fits_shape(self, entry: MapEntry) -> bool:
        return fits_shape(entry, self.first, self.second)

    def open_names(self) -> list[str]:
        return [name for name in self.first if name not in self.entries]

    def open_paths(self) -> list[str]:
        return [path for path in self.second if path not in self.owners]


def num_wide(shape: tuple[int, ...]) -> int:
    return sum(size > 1 for size in shape)


def fits_shape(entry: MapEntry, first: Arrays, second: Arrays) -> bool:
    """Whether the arrays of an entry exist, and give the shape of its parameter."""
    try:
        shapes = [second[path].shape for path in entry.paths]
        return entry.canonical_shape(*shapes) == first[entry.name].shape
    except (KeyError, MappingError):
        return False


def same_value(array: np.ndarray | Summary, other: np.ndarray | Summary) -> bool:
    """Whether all elements of both arrays have one value."""
    if not array.size > 0 < other.size or varies(array) or varies(other):
        return False
    one, another = (each.value if isinstance(each, Summary) else each.flat[0] for each in (array, other))
    return one == another


def relative_distance(array: np.ndarray | Summary, other: np.ndarray | Summary) -> float:
    """norm(array - other) / norm(array); NaN if the first one is zero. With a summary, an estimate relative to its norm."""
    if isinstance(array, Summary):
        return array.distance(other)
    if isinstance(other, Summary):
        return other.distance(array)
    x, y = array.astype(np.float64), other.astype(np.float64)
    norm = float(np.linalg.norm(x))
    return float(np.linalg.norm(x - y)) / norm if norm > 0 else math.nan
