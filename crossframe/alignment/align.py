"""Aligns two models: the parameters that are equal but for their names, dims and grouping, found by their values.

Evidence comes in this order. An array whose slices are parameters of the other model holds these stacked, and so do the others of
its module (`crossframe.alignment.stacks`). A parameter whose elements are those of one other is that one; the rearrangement is
found (`solve`) and checked on all elements. An array whose rows are the slices of several others is these joined, and one
whose first rows are another is this one padded (`crossframe.alignment.portions`). Parameters with one value, such as the zeros of
biases, are told apart by their gradients, if there are any, and by the module that they belong to, as far as its other parameters
are aligned. Where a fault may have changed the gradients, the order in which modules are used tells them apart too, then similar
gradients, then equal names.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from crossframe.alignment.portions import Rows, bias_text, cut_text, indexed_text, joined_text, padded_text, rows_of
from crossframe.alignment.slices import axis_signatures, element_hashes
from crossframe.alignment.solve import rearrangements, same_bits, solve
from crossframe.alignment.stacks import Slice, slices_of
from crossframe.dtypes import coarser, numpy_dtype
from crossframe.errors import MappingError
from crossframe.param_map import MapEntry, ParamMap
from crossframe.rearrange import Rearrangement

Arrays = Mapping[str, np.ndarray]
VALUES, GRADIENTS, MODULES, USE, SIMILAR, NAMES = "values", "gradients", "modules", "use", "similar", "names"
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
        evidence: what decided each, by name: VALUES, GRADIENTS or MODULES; where a fault may be, also the order of USE, SIMILAR
            gradients, or equal NAMES in corresponding modules.
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


def align(
    first: Arrays,
    second: Arrays,
    gradients: tuple[Arrays, Arrays] | None = None,
    *,
    may_differ: bool = False,
    uses: tuple[Sequence[str], Sequence[str]] = ((), ()),
) -> Alignment:
    """Find the parameters of the second model for each of the first one.

    Args:
        first: initial values by canonical name.
        second: initial values by path.
        gradients: those of the first step, for parameters whose values are all equal; parameters may be missing.
        may_differ: whether a fault may have changed the gradients. Parameters that they do not tell apart are then those that are
            used after the same ones, whose gradients are the most similar, or that have equal names in corresponding modules.
        uses: the modules of both models in the order in which they are first used, as far as it is known.

    If the dtypes of parameters differ, all are compared in the coarsest one.

    Raises:
        MappingError: a model has no parameters.
    """
    if not first or not second:
        raise MappingError("expected parameters in both models")
    dtype = coarser(*(array.dtype.name for side in (first, second) for array in side.values()))
    one, other = ({n: v.astype(numpy_dtype(dtype), copy=False) for n, v in side.items()} for side in (first, second))
    return _Aligner(one, other, gradients or ({}, {}), may_differ=may_differ, uses=uses).align()


def align_either_way(first: Arrays, second: Arrays, gradients: tuple[Arrays, Arrays]) -> tuple[Alignment, bool]:
    """`align`, with the names of the second model if those of the first one leave parameters undecided and these do not; and
    whether they are those of the second one.

    An entry has one name and one pattern: a parameter that consists of arrays of different dims has no entry of its own, but
    each of these arrays has one.
    """
    found = align(first, second, gradients)
    if found.undecided and not (back := align(second, first, (gradients[1], gradients[0]))).undecided:
        return back, True
    return found, False


class _Aligner:
    def __init__(
        self,
        first: Arrays,
        second: Arrays,
        gradients: tuple[Arrays, Arrays],
        *,
        may_differ: bool,
        uses: tuple[Sequence[str], Sequence[str]],
    ) -> None:
        self._first, self._second, self._gradients, self._may_differ = first, second, gradients, may_differ
        self._entries: dict[str, MapEntry] = {}
        self._evidence: dict[str, str] = {}
        self._owners: dict[str, tuple[str, ...]] = {}
        self._undecided: list[Undecided] = []
        self._places = tuple({module: place for place, module in enumerate(modules)} for modules in uses)
        self._known: dict[tuple[int, str], dict[tuple[int, ...], np.ndarray]] = {}
        self._slices: dict[str, Slice] = {}
        self._open_varied: tuple[list[str], ...] = ()  # parameters with several values that have no counterpart

    def align(self) -> Alignment:
        self._unstack()
        groups = self._groups()
        for varies in (True, False):  # the weights of a module decide about the order of its biases
            for names, paths in groups:
                if len(names) == len(paths) == 1 and _varies(self._first[names[0]]) == varies:
                    self._pair(names[0], paths[0], VALUES)
        self._join()
        self._open_varied = tuple(
            [each for each in names if _varies(side[each])]
            for names, side in zip((self._open_names(), self._open_paths()), self._sides(), strict=True)
        )
        decided = True
        while decided:  # each decision is evidence for others
            decided = False
            for names, paths in groups:
                decided |= self._decide(names, paths)
            for name in self._open_names():
                decided |= self._join_bias(name)
            for path in self._open_paths():
                decided |= self._split_bias(path)
            decided = decided or any(self._pair_last(names, paths) for names, paths in groups)
            if self._may_differ:
                for pair in (self._pair_by_use, self._pair_similar, self._pair_by_names):
                    decided = decided or any(pair(names, paths) for names, paths in groups)
        self._report_open()
        entries = tuple(self._stated(self._entries[name]) for name in self._first if name in self._entries)
        return Alignment(ParamMap(entries), self._evidence, tuple(self._undecided))

    def _groups(self) -> list[tuple[list[str], list[str]]]:
        """The names and paths of parameters with the same elements."""
        groups: dict[tuple[int, int], tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
        for i, side in enumerate((self._first, self._second)):
            for name, array in side.items():
                groups[self._signature(i, name), array.size][i].append(name)
        return [(names, paths) for names, paths in groups.values() if names and paths]

    def _unstack(self) -> None:
        """Replace arrays of stacked parameters by their slices, and these by theirs."""
        while True:
            signatures = [{name: self._signatures(i, name) for name in side} for i, side in enumerate(self._sides())]
            found = slices_of(self._first, self._second, *signatures)
            if not found:
                return
            stacked = {each.path for each in found.values()}
            self._second, gradients = (
                {path: array for path, array in side.items() if path not in stacked}
                | {name: each.of(side[each.path]) for name, each in found.items() if each.path in side}
                for side in (self._second, self._gradients[1])
            )
            self._gradients = self._gradients[0], gradients
            for name, each in found.items():
                outer = self._slices.get(each.path)
                self._slices[name] = each.inside(outer, self._second[name].ndim + 1) if outer else each

    def _sides(self) -> tuple[Arrays, Arrays]:
        return self._first, self._second

    def _stated(self, entry: MapEntry) -> MapEntry:
        """An entry with the paths of the model instead of slices."""
        if not (slices := [self._slices[path] for path in entry.paths if path in self._slices]):
            return entry
        paths = tuple(each.path for each in slices)
        num_dims = self._second[entry.paths[0]].ndim
        return replace(
            entry,
            path=paths if isinstance(entry.path, tuple) else paths[0],
            pattern=indexed_text(entry.pattern, num_dims, slices[0].indices),
        )

    def _signatures(self, side: int, name: str) -> dict[tuple[int, ...], np.ndarray]:
        """The signatures of the slices of a parameter along each set of its axes; () for the whole."""
        if (side, name) not in self._known:
            array = self._sides()[side][name]
            hashes = element_hashes(array)
            most = array.ndim if array.size <= _MOST_ELEMENTS else array.ndim - 1
            sets = (axes for count in range(most + 1) for axes in itertools.combinations(range(array.ndim), count))
            self._known[side, name] = {axes: axis_signatures(hashes, axes) for axes in sets}
        return self._known[side, name]

    def _signature(self, side: int, name: str) -> int:
        return int(self._signatures(side, name)[()][0])

    def _add(self, entry: MapEntry, evidence: str) -> None:
        self._entries[entry.name], self._evidence[entry.name] = entry, evidence
        for path in entry.paths:
            self._owners[path] = (*self._owners.get(path, ()), entry.name)

    def _pair(self, name: str, path: str, evidence: str) -> bool:
        """Add one parameter, if a rearrangement of its dims is known."""
        found = self._rearrangement(name, path)
        if found is not None:
            identity = self._first[name].shape == self._second[path].shape and found.is_identity
            self._add(MapEntry(name, path, None if identity else found.text), evidence)
        return found is not None

    def _rearrangement(self, name: str, path: str) -> Rearrangement | None:
        """That of the values. If these fit several: the one that the gradients fit, or that joins or permutes dims as another
        parameter of the same module does."""
        array, other = self._first[name], self._second[path]
        found = solve(array, other)
        if found is None or _varies(array):
            return found
        if _num_wide(array.shape) == _num_wide(other.shape) == 1:
            return self._order_of_bias(name, path, found)
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

    def _order_of_bias(self, name: str, path: str, unchanged: Rearrangement) -> Rearrangement | None:
        """That of an array with one value and one wide dim, which is permuted as the weights of its module are; None if these
        have several such dims, and gradients do not tell which one it belongs to."""
        places = np.arange(self._second[path].size).reshape(self._second[path].shape)
        fits: dict[bytes, Rearrangement] = {}  # by the order of elements that they give
        for entry in self._entries.values():
            is_sibling = _module_of(entry.name) == _module_of(name) and _module_of(entry.paths[0]) == _module_of(path)
            if not is_sibling or len(entry.paths) > 1 or entry.selects or entry.pads:
                continue
            weight = self._first[entry.name]
            pattern = entry.pattern or Rearrangement.transposing(tuple(range(weight.ndim))).text
            for dim, size in enumerate(weight.shape):
                text = bias_text(pattern, places.ndim, dim=dim, after=True) if size == places.size else None
                if text is not None and self._fits_shape(MapEntry(name, path, text)):
                    form = Rearrangement(text)
                    fits.setdefault(form(places).tobytes(), form)
        same = unchanged(places).tobytes()
        if fits.keys() <= {same}:
            return unchanged
        if len(fits) == 1:
            return next(iter(fits.values()))
        near = [form for form in fits.values() if self._distance(name, path, form) < _NEAR]
        return near[0] if len(near) == 1 else None

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
        return _relative_distance(gradient, found(other))

    # Parameters that are joined, or that have padding

    def _join(self) -> None:
        """Add parameters that consist of several arrays, arrays that consist of several parameters, then padded ones."""
        for name in self._open_names():
            self._join_paths(name)
        for path in self._open_paths():
            self._split_path(path)
        for name in self._open_names():
            self._pad(name)
        for path in self._open_paths():
            self._pad_path(path)

    def _join_paths(self, name: str) -> None:
        """Add a parameter whose rows are arrays of the second model."""
        array = self._first[name]
        for members in self._covers(0, name):
            forms = [solve(rows.of(array), self._second[path]) for rows, path in members]
            if None in forms:
                continue
            paths = tuple(path for _, path in members)
            if not self._is_stated_together(paths):
                continue
            counts = tuple(rows.total for rows, _ in members)
            texts = [
                joined_text(form, self._second[path].shape, rows, apart=apart)
                for apart in (False, True)
                for form, (rows, path) in zip(forms, members, strict=True)
                if form is not None
            ]
            # That of one array may be too special for the others, for instance if it has one head.
            for text in dict.fromkeys(texts):
                identity = text == Rearrangement.transposing(tuple(range(array.ndim))).text
                rows = None if len(set(counts)) == 1 else counts
                if text and self._add_verified([MapEntry(name, paths, None if identity else text, rows)]):
                    return

    def _is_stated_together(self, paths: Sequence[str]) -> bool:
        """Whether one pattern can state these paths: all are arrays, or slices at the same place."""
        return len({self._slices[path].indices if path in self._slices else () for path in paths}) == 1

    def _split_path(self, path: str) -> None:
        """Add parameters that are the rows of an array of the second model."""
        for members in self._covers(1, path):
            texts = [self._cut(name, path, rows) for rows, name in members]
            entries = [
                MapEntry(name, path, text) for (_, name), text in zip(members, texts, strict=True) if text is not None
            ]
            if len(entries) == len(members) and self._add_verified(entries):
                return

    def _cut(self, name: str, path: str, rows: Rows) -> str | None:
        """The pattern of a parameter that is rows of an array."""
        part = rows.of(self._second[path])
        form = solve(self._first[name], part)
        return None if form is None else cut_text(form, part.shape, rows)

    def _covers(self, side: int, whole: str) -> Iterator[list[tuple[Rows, str]]]:
        """Ways to cover the rows of an array of one model by arrays of the other one, for each of its dims."""
        found = self._portions(side, whole)
        for dim, blocks in dict.fromkeys((rows.dim, rows.blocks) for rows, _ in found):
            starts = {rows.start: (rows, part) for rows, part in found if (rows.dim, rows.blocks) == (dim, blocks)}
            at, members, period = 0, [], self._sides()[side][whole].shape[dim] // blocks
            while at in starts:
                members.append(starts[at])
                at = starts[at][0].stop
            if at == period:
                yield members

    def _portions(self, side: int, whole: str) -> list[tuple[Rows, str]]:
        """The open arrays of the other model that are rows of an array."""
        array, others = self._sides()[side][whole], self._sides()[1 - side]
        if not _varies(array):
            return []
        parts = self._open_paths() if side == 0 else self._open_names()
        parts = [part for part in parts if others[part].size < array.size and _varies(others[part])]
        found = []
        for dim in range(array.ndim):
            if array.shape[dim] < 2 or (dim,) not in self._signatures(side, whole):
                continue
            rows = self._signatures(side, whole)[dim,]
            for part in parts:
                run = rows_of(dim, rows, array.size, others[part].shape, self._signatures(1 - side, part))
                if run is not None:
                    found.append((run, part))
        return found

    def _pad(self, name: str) -> None:
        """Add a parameter whose first rows are an array, and whose other rows are padding."""
        found = self._portions(0, name)
        if len(found) == 1 and _is_padded(found[0][0]):
            (rows, path), array = found[0], self._first[name]
            form = solve(rows.of(array), self._second[path])
            text = None if form is None else padded_text(form, rows, array.shape[rows.dim])
            if text is not None:
                self._add_verified([MapEntry(name, path, text)])

    def _pad_path(self, path: str) -> None:
        """Add a parameter that is the first rows of an array, whose other rows are padding."""
        found = self._portions(1, path)
        if len(found) == 1 and _is_padded(found[0][0]):
            rows, name = found[0]
            if (text := self._cut(name, path, rows)) is not None:
                self._add_verified([MapEntry(name, path, text)])

    def _add_verified(self, entries: Sequence[MapEntry], evidence: str = VALUES) -> bool:
        """Add entries if all their values agree."""
        for entry in entries:
            form = Rearrangement(entry.pattern) if entry.pattern else None
            wanted = self._first[entry.name]
            try:
                made = entry.to_canonical(*(self._second[path] for path in entry.paths))
            except MappingError:
                return False
            if form is not None and form.pads:
                made, wanted = form.unpadded(made), form.unpadded(wanted)
            if not same_bits(wanted, made):
                return False
        for entry in entries:
            self._add(entry, evidence)
        return True

    def _join_bias(self, name: str) -> bool:
        """Add a parameter with one value that joins arrays as another one of its module does."""
        module = name.rpartition(".")[0]
        siblings = [
            entry for entry in self._entries.values() if len(entry.paths) > 1 and _module_of(entry.name) == module
        ]
        for sibling in siblings:
            found = (self._sibling_of(self._first[name], path) for path in sibling.paths)
            paths = tuple(path for path in found if path is not None)
            if len(paths) < len(sibling.paths):
                continue
            pattern, num_dims = sibling.pattern, self._second[paths[0]].ndim
            if pattern is not None:
                pattern = bias_text(pattern, num_dims, dim=Rearrangement(pattern).joint_dim, after=True)
            if (pattern is not None or num_dims == 1) and self._fits(
                entry := MapEntry(name, paths, pattern, sibling.rows)
            ):
                return self._add_verified([entry], MODULES)
        return False

    def _sibling_of(self, array: np.ndarray, path: str) -> str | None:
        """The only open array in the module of a path with the only value of another array."""
        inside = [
            other
            for other in self._open_paths()
            if _module_of(other) == _module_of(path) and _same_value(self._second[other], array)
        ]
        return inside[0] if len(inside) == 1 else None

    def _split_bias(self, path: str) -> bool:
        """Add parameters with one value that are portions of an array as others of its module are."""
        module, array = _module_of(path), self._second[path]
        siblings = [entry for entry in self._entries.values() if entry.selects and _module_of(entry.paths[0]) == module]
        entries = []
        for sibling in siblings:
            names = [
                name
                for name in self._open_names()
                if _module_of(name) == _module_of(sibling.name) and _same_value(self._first[name], array)
            ]
            assert sibling.pattern is not None
            form = Rearrangement(sibling.pattern)
            texts = (bias_text(sibling.pattern, array.ndim, dim=dim, after=False) for dim in range(len(form.left)))
            fits = [
                entry
                for text in texts
                if text and len(names) == 1 and self._fits(entry := MapEntry(names[0], path, text)) and entry.selects
            ]
            if len(fits) != 1:
                return False
            entries.append(fits[0])
        return bool(entries) and self._add_verified(entries, MODULES)

    def _fits(self, entry: MapEntry) -> bool:
        """Whether shapes fit, and gradients, if there are any."""
        name, (ours, theirs) = entry.name, self._gradients
        if not self._fits_shape(entry):
            return False
        if self._may_differ or name not in ours or not theirs.keys() >= set(entry.paths):
            return True
        made = entry.to_canonical(*(theirs[path] for path in entry.paths))
        return not _relative_distance(ours[name], made) > _NEAR

    def _fits_shape(self, entry: MapEntry) -> bool:
        try:
            shape = entry.canonical_shape(*(self._second[path].shape for path in entry.paths))
        except MappingError:
            return False
        return shape == self._first[entry.name].shape

    # Parameters with the same values as others

    def _decide(self, names: Sequence[str], paths: Sequence[str]) -> bool:
        """Add the parameters of a group that gradients or modules tell apart; whether there was one."""
        names = [name for name in names if name not in self._entries]
        paths = [path for path in paths if path not in self._owners]
        decided = False
        for name in names:
            near = [path for path in paths if path not in self._owners and self._is_near(name, path)]
            if len(near) == 1 and sum(self._is_near(other, near[0]) for other in names) == 1:
                decided |= self._pair(name, near[0], GRADIENTS)
                continue
            there = self._of_module(name, names, [path for path in paths if path not in self._owners])
            if there is not None:
                decided |= self._pair(name, there, MODULES)
        return decided

    def _pair_last(self, names: Sequence[str], paths: Sequence[str]) -> bool:
        """Add the parameter of an array that is the only one left of those with its values; whether there was one."""
        names = [name for name in names if name not in self._entries]
        paths = [path for path in paths if path not in self._owners]
        # Tied names, of which the first one has the array.
        is_owner = len(names) == 1 or (len(names) > 1 and _varies(self._first[names[0]]))
        return is_owner and len(paths) == 1 and self._pair(names[0], paths[0], VALUES)

    def _pair_similar(self, names: Sequence[str], paths: Sequence[str]) -> bool:
        """Add the parameters whose gradients are more similar to each other than to all others; whether there was one.

        A fault changes gradients less than another parameter does.
        """
        names = [name for name in names if name not in self._entries and name in self._gradients[0]]
        paths = [path for path in paths if path not in self._owners and path in self._gradients[1]]
        if not names or not paths or any(_num_wide(self._first[name].shape) > 1 for name in names):
            return False  # of several dims the order is open too
        apart = 1 - _directions(names, self._gradients[0]) @ _directions(paths, self._gradients[1]).T
        decided = False
        for i, name in enumerate(names):
            j = int(apart[i].argmin())
            others = np.append(np.delete(apart[i], j), np.delete(apart[:, j], i))
            if apart[i, j] < _FAR and apart[i, j] < _FAR * others.min(initial=2.0):
                decided |= self._pair(name, paths[j], SIMILAR)
        return decided

    def _pair_by_use(self, names: Sequence[str], paths: Sequence[str]) -> bool:
        """Add the parameters whose modules are used after the same aligned ones, if there is one of them in each model; whether
        there was one.

        A fault changes values, but seldom the order in which modules are used.
        """
        ours, theirs = (
            {each: place for each in group if (place := self._places[i].get(_module_of(each))) is not None}
            for i, group in enumerate((names, paths))
        )
        known: list[tuple[str, int, int]] = []
        for name, entry in self._entries.items():
            own = self._places[0].get(_module_of(name))
            others = [self._places[1].get(_module_of(path)) for path in entry.paths]
            if own is not None and None not in others:
                known.append((name, own, min(place for place in others if place is not None)))
        before = [
            {
                each: [name for name, *places in sorted(known, key=lambda row: row[i + 1]) if places[i] < place]
                for each, place in side.items()
                if each not in (self._entries, self._owners)[i]
            }
            for i, side in enumerate((ours, theirs))
        ]
        decided = False
        for name, earlier in before[0].items():
            alike = [
                [each for each, other in side.items() if set(other) == set(earlier) and other[-1:] == earlier[-1:]]
                for side in before
            ]
            if earlier and len(alike[0]) == len(alike[1]) == 1:
                decided |= self._pair(name, alike[1][0], USE)
        return decided

    def _pair_by_names(self, names: Sequence[str], paths: Sequence[str]) -> bool:
        """Add the parameters that have the same name in modules that enclose the same aligned parameters; whether there was
        one."""
        names = [name for name in names if name not in self._entries]
        paths = [path for path in paths if path not in self._owners]
        inside = [
            [(each, module) for each in group if (module := self._enclosing_known(each, known)) is not None]
            for group, known in ((names, self._entries), (paths, self._owners))
        ]
        decided = False
        for name, module in inside[0]:
            known = {each for each in self._entries if _is_in(each, module)}
            own = _first_part(name, module)
            twice = [each for each, other in inside[0] if other == module and _first_part(each, other) == own]
            there = [
                path
                for path, other in inside[1]
                if _first_part(path, other) == own
                and {each for p in self._owners if _is_in(p, other) for each in self._owners[p]} == known
            ]
            if len(twice) == len(there) == 1:
                decided |= self._pair(name, there[0], NAMES)
        return decided

    def _enclosing_known(self, name: str, known: Iterable[str]) -> str | None:
        """The innermost module that encloses a parameter and an aligned one."""
        return next((module for module in _enclosing(name) if any(_is_in(each, module) for each in known)), None)

    def _is_near(self, name: str, path: str) -> bool:
        array, other = self._first[name], self._second[path]
        return any(self._distance(name, path, each) < _NEAR for each in rearrangements(array.shape, other.shape))

    def _of_module(self, name: str, names: Sequence[str], paths: Sequence[str]) -> str | None:
        """The only one of these paths in the module of a name, if it is the only one of these names there."""
        for module in _enclosing(name):
            known = {each for each in self._entries if _is_in(each, module)}
            alike = [other for other in names if other not in self._entries and _is_in(other, module)]
            if not known or any(_is_in(each, module) for each in self._open_varied[0]):
                continue
            wanted = {path for each in known for path in self._entries[each].paths}
            modules = {there for path in wanted for there in _enclosing(path)}
            for there in sorted(modules, key=len, reverse=True):
                inside = [path for path in paths if _is_in(path, there)]
                owned = {path for path in self._owners if _is_in(path, there)}
                owners = {name for path in owned for name in self._owners[path]}
                unknown = any(_is_in(path, there) for path in self._open_varied[1])
                if owners == known and owned == wanted and not unknown and len(inside) == len(alike) == 1:
                    return inside[0]
        return None

    # The rest

    def _open_names(self) -> list[str]:
        return [name for name in self._first if name not in self._entries]

    def _open_paths(self) -> list[str]:
        return [path for path in self._second if path not in self._owners]

    def _report_open(self) -> None:
        """List what is open: groups with the same elements, then each parameter that has no counterpart."""
        for names, paths in self._groups():
            names = [name for name in names if name not in self._entries]
            paths = [path for path in paths if path not in self._owners]
            if names and paths:
                varied = len(names) == len(paths) == 1 and _varies(self._first[names[0]])
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
        """The parameters of the first model that an array consists of, which no pattern states."""
        return tuple(name for _, name in next(self._covers(1, path), ()))


_SAME_VALUES = (
    "equal values do not tell them, or their dims, apart; gradients of the first step decide, if both models are recordings "
    "that have them"
)
_OTHER_ORDER = "the same elements in another order, which no rearrangement of dims explains"
_INSIDE = "the path has these parameters as its rows in an order that no pattern states; split it"
_ALONE = "no counterpart has the same elements; were both models given the same initial values?"


def _num_wide(shape: tuple[int, ...]) -> int:
    return sum(size > 1 for size in shape)


def _varies(array: np.ndarray) -> bool:
    """Whether not all elements are equal."""
    return array.size > 0 and bool((array != array.flat[0]).any())


def _same_value(array: np.ndarray, other: np.ndarray) -> bool:
    """Whether all elements of both arrays have one value."""
    return array.size > 0 < other.size and not _varies(array) and not _varies(other) and array.flat[0] == other.flat[0]


def _relative_distance(array: np.ndarray, other: np.ndarray) -> float:
    """norm(array - other) / norm(array); NaN if the first one is zero."""
    x, y = array.astype(np.float64), other.astype(np.float64)
    norm = float(np.linalg.norm(x))
    return float(np.linalg.norm(x - y)) / norm if norm > 0 else math.nan


def _directions(names: Sequence[str], gradients: Arrays) -> np.ndarray:
    """Gradients of one size as rows of norm 1; of norm 0 if they are zero."""
    rows = np.stack([gradients[name].astype(np.float64).reshape(-1) for name in names])
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float64).tiny)


def _is_padded(rows: Rows) -> bool:
    """Whether rows are the first ones of an array, and most of them."""
    return rows.blocks == 1 and rows.start == 0 and 2 * rows.count > rows.period


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _first_part(name: str, module: str) -> str:
    """What a module calls the parameter, or the module that encloses it.

    >>> _first_part("layers.0.norm.weight", "layers.0")
    'norm'
    """
    return name[len(module) + 1 :].partition(".")[0]


def _is_in(name: str, module: str) -> bool:
    return not module or name == module or name.startswith(f"{module}.")


def _enclosing(name: str) -> Iterator[str]:
    """The modules that enclose a parameter, the innermost first, without the root.

    >>> list(_enclosing("layers.0.fc.bias"))
    ['layers.0.fc', 'layers.0', 'layers']
    """
    while name := name.rpartition(".")[0]:
        yield name
