"""Aligns two models: the parameters that are equal but for their names, dims and grouping, found by their values.

Evidence comes in this order. A parameter whose elements are those of one other is that one; the rearrangement between them is
found (`solve`) and checked on all elements. A parameter whose rows are the slices of several others is these joined. Parameters
with one value, such as the zeros of biases, are told apart by their gradients, if there are any, and by the module that they
belong to, as far as its other parameters are aligned.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from crossframe.alignment.slices import axis_sets, axis_signatures, element_hashes
from crossframe.alignment.solve import rearrangements, row_order, solve
from crossframe.dtypes import coarser, numpy_dtype
from crossframe.errors import MappingError
from crossframe.param_map import MapEntry, ParamMap
from crossframe.rearrange import Rearrangement

Arrays = Mapping[str, np.ndarray]
VALUES, GRADIENTS, MODULES = "values", "gradients", "modules"
_NEAR, _FAR = 0.01, 0.5
"""Gradients of one parameter differ by rounding, those of two by about their norms. Relative distances below the first one and
above the second one decide."""
_MOST_ELEMENTS = 1 << 16
"""Parameters of at most this size, such as biases, are joined element by element."""


@dataclass(frozen=True)
class Undecided:
    """Parameters that may belong together.

    Attributes:
        names: of the first model.
        paths: of the second model.
        why: why it is not decided, and what would decide it.
    """

    names: tuple[str, ...]
    paths: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Alignment:
    """The parameters of the second model for each of the first one.

    Attributes:
        param_map: the decided ones, in the order of the first model.
        evidence: what decided each, by name: VALUES, GRADIENTS or MODULES.
        undecided: the others.
    """

    param_map: ParamMap
    evidence: Mapping[str, str]
    undecided: tuple[Undecided, ...]

    def to_json(self) -> dict:
        """The alignment as a JSON object; `map` is what `ParamMap.from_json` reads."""
        return {
            "map": self.param_map.to_json(),
            "evidence": dict(self.evidence),
            "undecided": [
                {"names": list(each.names), "paths": list(each.paths), "why": each.why} for each in self.undecided
            ],
        }


def align(first: Arrays, second: Arrays, gradients: tuple[Arrays, Arrays] | None = None) -> Alignment:
    """Find the parameters of the second model for each of the first one.

    Args:
        first: initial values by canonical name.
        second: initial values by path.
        gradients: those of the first step, for parameters whose values are all equal; parameters may be missing.

    If the dtypes of parameters differ, all are compared in the coarsest one.

    Raises:
        MappingError: a model has no parameters.
    """
    if not first or not second:
        raise MappingError("expected parameters in both models")
    dtype = coarser(*(array.dtype.name for side in (first, second) for array in side.values()))
    one, other = ({n: v.astype(numpy_dtype(dtype), copy=False) for n, v in side.items()} for side in (first, second))
    return _Aligner(one, other, gradients or ({}, {})).align()


class _Aligner:
    def __init__(self, first: Arrays, second: Arrays, gradients: tuple[Arrays, Arrays]) -> None:
        self._first, self._second, self._gradients = first, second, gradients
        self._entries: dict[str, MapEntry] = {}
        self._evidence: dict[str, str] = {}
        self._owner: dict[str, str] = {}
        self._undecided: list[Undecided] = []
        self._known: dict[tuple[int, str], dict[tuple[int, ...], np.ndarray]] = {}

    def align(self) -> Alignment:
        groups = self._groups()
        for names, paths in groups:
            if len(names) == len(paths) == 1:
                self._pair(names[0], paths[0], VALUES)
        self._join_rows()
        decided = True
        while decided:  # each decision is evidence for others
            decided = False
            for names, paths in groups:
                decided |= self._decide(names, paths)
        self._report_open()
        entries = tuple(self._entries[name] for name in self._first if name in self._entries)
        return Alignment(ParamMap(entries), self._evidence, tuple(self._undecided))

    def _groups(self) -> list[tuple[list[str], list[str]]]:
        """The names and paths of parameters with the same elements."""
        groups: dict[tuple[int, int], tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
        for i, side in enumerate((self._first, self._second)):
            for name, array in side.items():
                groups[self._signature(i, name), array.size][i].append(name)
        return [(names, paths) for names, paths in groups.values() if names and paths]

    def _signatures(self, side: int, name: str) -> dict[tuple[int, ...], np.ndarray]:
        """The signatures of the slices of a parameter along each set of its axes; () for the whole."""
        if (side, name) not in self._known:
            array = (self._first, self._second)[side][name]
            hashes = element_hashes(array)
            most = array.ndim if array.size <= _MOST_ELEMENTS else array.ndim - 1
            sets = (axes for count in range(most + 1) for axes in itertools.combinations(range(array.ndim), count))
            self._known[side, name] = {axes: axis_signatures(hashes, axes) for axes in sets}
        return self._known[side, name]

    def _signature(self, side: int, name: str) -> int:
        return int(self._signatures(side, name)[()][0])

    def _add(self, entry: MapEntry, evidence: str) -> None:
        self._entries[entry.name], self._evidence[entry.name] = entry, evidence
        self._owner |= dict.fromkeys(entry.paths, entry.name)

    def _pair(self, name: str, path: str, evidence: str) -> bool:
        """Add one parameter, if a rearrangement of its dims is known."""
        found = self._rearrangement(name, path)
        if found is not None:
            identity = self._first[name].shape == self._second[path].shape and found.is_identity
            self._add(MapEntry(name, path, None if identity else found.text), evidence)
        return found is not None

    def _rearrangement(self, name: str, path: str) -> Rearrangement | None:
        """That of the values. If these fit several: the one that the gradients fit, or that joins dims as another parameter of
        the same module does."""
        array, other = self._first[name], self._second[path]
        found = solve(array, other)
        if found is None or (array != array.flat[0]).any() or _num_wide(array.shape) == _num_wide(other.shape) == 1:
            return found
        fits = list(rearrangements(array.shape, other.shape))
        if len(fits) == 1:
            return found
        distances = [self._distance(name, path, each) for each in fits]
        near = [each for each, distance in zip(fits, distances, strict=True) if distance < _NEAR]
        if len(near) == 1 and sum(distance > _FAR for distance in distances) == len(fits) - 1:
            return near[0]
        known = self._joins_in_module(name)
        alike = [each for each in fits if (joins := each.joins(other.shape)) and joins <= known]
        return alike[0] if len(alike) == 1 else None

    def _joins_in_module(self, name: str) -> set[tuple[tuple[int, int], ...]]:
        """How other parameters of a module join dims."""
        module = name.rpartition(".")[0]
        entries = [
            entry for entry in self._entries.values() if entry.name.rpartition(".")[0] == module and entry.pattern
        ]
        return {
            join
            for entry in entries
            for join in Rearrangement(entry.pattern or "").joins(self._second[entry.paths[0]].shape)
        }

    def _distance(self, name: str, path: str, found: Rearrangement | None) -> float:
        """The relative distance of the gradients; NaN if one is missing or zero."""
        gradient, other = self._gradients[0].get(name), self._gradients[1].get(path)
        if gradient is None or other is None or found is None:
            return math.nan
        x, y = gradient.astype(np.float64), found(other).astype(np.float64)
        norm = float(np.linalg.norm(x))
        return float(np.linalg.norm(x - y)) / norm if norm > 0 else math.nan

    # Parameters that are joined from several

    def _join_rows(self) -> None:
        for name in self._open_names():
            self._join(name, self._open_paths())

    def _join(self, name: str, paths: Sequence[str]) -> None:
        """Add a parameter whose runs of rows are parameters of the second model."""
        array = self._first[name]
        if array.ndim == 0 or (array == array.flat[0]).all():
            return
        rows = self._signatures(0, name)[0,]
        runs: dict[int, tuple[int, str]] = {}
        for path in paths:
            other = self._second[path]
            run = _run_of(rows, array.size // len(rows), other.shape, self._signatures(1, path))
            if run is not None:
                runs.setdefault(run[0], (run[1], path))
        start, parts, patterns = 0, [], []
        while start in runs:
            count, path = runs[start]
            found = solve(array[start : start + count], self._second[path])
            parts.append((count, path))
            patterns.append(None if found is None else found.text)
            start += count
        if start == len(rows) and len(parts) > 1 and None not in patterns and len(set(patterns)) == 1:
            counts = tuple(count for count, _ in parts)
            same = len(set(counts)) == 1
            identity = patterns[0] == Rearrangement.transposing(tuple(range(array.ndim))).text
            pattern = None if identity else patterns[0]
            self._add(MapEntry(name, tuple(path for _, path in parts), pattern, None if same else counts), VALUES)

    # Parameters with the same values as others

    def _decide(self, names: Sequence[str], paths: Sequence[str]) -> bool:
        """Add the parameters of a group that gradients or modules tell apart; whether there was one."""
        names = [name for name in names if name not in self._entries]
        paths = [path for path in paths if path not in self._owner]
        decided = False
        for name in names:
            near = [path for path in paths if path not in self._owner and self._is_near(name, path)]
            if len(near) == 1 and sum(self._is_near(other, near[0]) for other in names) == 1:
                decided |= self._pair(name, near[0], GRADIENTS)
                continue
            there = self._of_module(name, names, [path for path in paths if path not in self._owner])
            if there is not None:
                decided |= self._pair(name, there, MODULES)
        return decided

    def _is_near(self, name: str, path: str) -> bool:
        array, other = self._first[name], self._second[path]
        return any(self._distance(name, path, each) < _NEAR for each in rearrangements(array.shape, other.shape))

    def _of_module(self, name: str, names: Sequence[str], paths: Sequence[str]) -> str | None:
        """The only one of these paths in the module of a name, if it is the only one of these names there."""
        for module in _enclosing(name):
            known = {each for each in self._entries if _is_in(each, module)}
            alike = [other for other in names if other not in self._entries and _is_in(other, module)]
            if not known:
                continue
            modules = {there for each in known for path in self._entries[each].paths for there in _enclosing(path)}
            for there in sorted(modules, key=len, reverse=True):
                inside = [path for path in paths if _is_in(path, there)]
                owners = {owner for path, owner in self._owner.items() if _is_in(path, there)}
                if owners == known and len(inside) == len(alike) == 1:
                    return inside[0]
        return None

    # The rest

    def _open_names(self) -> list[str]:
        return [name for name in self._first if name not in self._entries]

    def _open_paths(self) -> list[str]:
        return [path for path in self._second if path not in self._owner]

    def _report_open(self) -> None:
        """List what is open: groups with the same elements, then each parameter that has no counterpart."""
        for names, paths in self._groups():
            names = [name for name in names if name not in self._entries]
            paths = [path for path in paths if path not in self._owner]
            if names and paths:
                varied = (
                    len(names) == len(paths) == 1 and (self._first[names[0]] != self._first[names[0]].flat[0]).any()
                )
                self._undecided.append(Undecided(tuple(names), tuple(paths), _OTHER_ORDER if varied else _SAME_VALUES))
        reported = {each for undecided in self._undecided for each in (*undecided.names, *undecided.paths)}
        for path in self._open_paths():
            if path not in reported and (names := self._inside(path)):
                self._undecided.append(Undecided(names, (path,), _INSIDE))
                reported |= {*names, path}
        aligned = {self._signature(0, name): name for name in self._entries}
        for name in self._open_names():
            if name not in reported:
                tied = aligned.get(self._signature(0, name))
                why = f"equal to {tied!r}; leave it out if the two are tied" if tied else _ALONE
                self._undecided.append(Undecided((name,), (), why))
        self._undecided += [Undecided((), (path,), _ALONE) for path in self._open_paths() if path not in reported]

    def _inside(self, path: str) -> tuple[str, ...]:
        """The parameters of the first model that a path consists of, stacked or joined along one of its dims."""
        array = self._second[path]
        for dim in range(array.ndim):
            slices, width = self._signatures(1, path)[dim,], array.size // array.shape[dim]
            runs = {
                name: _run_of(slices, width, self._first[name].shape, self._signatures(0, name))
                for name in self._open_names()
            }
            found = sorted((run, name) for name, run in runs.items() if run is not None)
            if len(found) > 1 and sum(count for (_, count), _ in found) == len(slices):
                return tuple(name for _, name in found)
        return ()


_SAME_VALUES = (
    "equal values do not tell them, or their dims, apart; gradients of the first step decide, if both models are recordings "
    "that have them"
)
_OTHER_ORDER = "the same elements in another order, which no rearrangement of dims explains"
_INSIDE = "the path has these parameters as its slices, which a map cannot state; split it, or give the models in the other order"
_ALONE = "no counterpart has the same elements; were both models given the same initial values?"


def _num_wide(shape: tuple[int, ...]) -> int:
    return sum(size > 1 for size in shape)


def _run_of(
    rows: np.ndarray, width: int, shape: tuple[int, ...], signatures: Mapping[tuple[int, ...], np.ndarray]
) -> tuple[int, int] | None:
    """(first row, number of rows) of the run of rows that are the slices of another array along some of its axes; None if there
    is none.

    Args:
        rows: signatures of the rows, of `width` elements each.
        shape, signatures: of the other array, by its axes.
    """
    count, rest = divmod(math.prod(shape), width)
    if rest or not 0 < count <= len(rows):
        return None
    for axes in axis_sets(shape, count) if count > 1 else [()]:
        order = row_order(rows, signatures[axes]) if axes in signatures else None
        if order is not None and np.array_equal(np.sort(order), np.arange(order.min(), order.min() + count)):
            return int(order.min()), count
    return None


def _is_in(name: str, module: str) -> bool:
    return not module or name == module or name.startswith(f"{module}.")


def _enclosing(name: str) -> Iterator[str]:
    """The modules that enclose a parameter, the innermost first, without the root.

    >>> list(_enclosing("layers.0.fc.bias"))
    ['layers.0.fc', 'layers.0', 'layers']
    """
    while name := name.rpartition(".")[0]:
        yield name
