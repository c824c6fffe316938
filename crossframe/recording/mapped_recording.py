"""A view of a recording in the names, shapes and modules of another one, by a map between the parameters of the two.

Arrays are rearranged when they are read. Parameters whose names alone differ keep the layout in which they were recorded. Of all
others a rank has the rows that the core's layout assigns to it, as in a recording that was made with the map.
"""

import copy
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from crossframe.dtypes import numpy_dtype
from crossframe.errors import MappingError, RecordingError
from crossframe.layout import Layout, layout_from_json, layouts_by_rows
from crossframe.param_map import MapEntry, ParamMap, identity_map
from crossframe.params import ParamSpec
from crossframe.rearrange import Rearrangement
from crossframe.recording.dims import Order, channels_first, channels_first_shape
from crossframe.recording.element_ranges import ElementRange
from crossframe.recording.event_format import FORWARD, WHOLE_ON_RANK
from crossframe.recording.event_index import UnequalRanks
from crossframe.recording.known_settings import GROUPS, PER_RANK
from crossframe.recording.manifest import SKETCH, Manifest
from crossframe.recording.module_calls import called_module
from crossframe.recording.reader import Recording
from crossframe.recording.sketch import Sketch, sketches_of
from crossframe.unit_assignment import enclosing_unit

Of = tuple[str, str]
"""(module, "input" or "output")."""
Activations = Mapping[Of, tuple[Of, Rearrangement | None]]
"""For activations of the one recording, those of the other one, and the rearrangement of these."""
_KEPT = 8
"""Number of rearranged arrays that are kept."""


@dataclass(frozen=True)
class _MappedRange(ElementRange):
    """A range of elements of a rearranged parameter.

    Attributes:
        what: phase, parameter and entry of the optimizer state.
    """

    what: tuple[str, str, str] = ("", "", "")


class MappedRecording(Recording):
    """A recording in the names of another one.

    Attributes:
        source: the recording as it is.
    """

    def __init__(self, source: Recording, manifest: Manifest, param_map: ParamMap, activations: Activations) -> None:
        """Use `mapped`."""
        super().__init__(source.directory, manifest, source._indexes, source.num_steps, source.golden)
        self.source = source
        self._map, self._given = param_map, activations
        self._kept = _kept(source.manifest, param_map)
        self._to_source = _modules(param_map, activations)
        self._to_view = {theirs: own for own, theirs in self._to_source.items()}
        self._arrays: dict[tuple[Any, ...], np.ndarray] = {}

    @property
    def units_in_source(self) -> dict[str, str]:
        """For each unit of the view, the unit of the recording that has its first parameter."""
        found: dict[str, str] = {}
        for name, unit in self.manifest.unit_of.items():
            found.setdefault(unit, self.source.manifest.unit_of[self._paths(name)[0]])
        return found

    @property
    def stored_spread(self) -> None:
        """None: the spread of a golden is known by the names of the golden."""
        return

    def perturbed_runs(self) -> tuple[Recording, ...]:
        runs = (MappedRecording(run, self.manifest, self._map, self._given) for run in self.source.perturbed_runs())
        return tuple(run.with_channels_first(self._moved) for run in runs)

    def first(self, num_steps: int) -> Recording:
        view = copy.copy(self)
        view.source = self.source.first(num_steps)
        view.num_steps, view._views = view.source.num_steps, {}
        return view

    def recorded_steps(self) -> tuple[int, ...]:
        """The steps whose tensors can be compared: a sketch depends on the order of elements."""
        return tuple(step for step in self.source.recorded_steps() if not self._has_lost_sketches(step))

    def _has_lost_sketches(self, step: int) -> bool:
        """Whether a parameter was recorded as a sketch that is not that of its elements in the view."""
        lost = {path for name in self.manifest.params if not self._keeps_sketches(name) for path in self._paths(name)}
        of = self.source._step_ranges(step).of
        return any(part.sketch is not None for (_, path, _), ranges in of.items() if path in lost for part in ranges)

    # Parameters

    def _paths(self, name: str) -> tuple[str, ...]:
        return self._map.by_name[name].paths

    def _keeps_order(self, name: str) -> bool:
        """Whether the parameter has the same elements in the same order."""
        return self._map.by_name[name].keeps_order

    def _keeps_sketches(self, name: str) -> bool:
        """Whether the sketches of a parameter are those of its elements in the view. Up to format 6 they depend on its name."""
        by_name = self.source.manifest.sketches_by_name
        return self._keeps_order(name) and (not by_name or self._paths(name) == (name,))

    def has(self, phase: str, step: int, name: str, rank: int | None = None, use: str = "") -> bool:
        return any(self.source.has(phase, step, path, rank, use) for path in self._paths(name))

    def is_sketched(self, phase: str, step: int, name: str, use: str = "") -> bool:
        return any(self.source.is_sketched(phase, step, path, use) for path in self._paths(name))

    def ranges(self, phase: str, step: int, name: str, use: str = "") -> list[ElementRange]:
        paths = self._paths(name)
        found = [part for path in paths for part in self.source.ranges(phase, step, path, use)]
        is_whole = self._keeps_order(name) and (phase in WHOLE_ON_RANK or self.source.manifest.detail == SKETCH)
        if is_whole or name in self._kept or not found:
            return found
        dtype, what = found[0].dtype, (phase, name, use)
        if phase in WHOLE_ON_RANK:
            numel, ranks = self.manifest.params[name].numel, dict.fromkeys(part.rank for part in found)
            return [_MappedRange(rank, 0, numel, dtype, name, what=what) for rank in ranks]
        layout, shard = self.manifest.layout_of(name), self.manifest.mesh.shard
        return [
            _MappedRange(rank, piece.param_start, piece.param_stop, dtype, name, what=what)
            for rank in range(self.manifest.world_size)
            for piece in layout.pieces(rank % shard)
            if piece.name == name
        ]

    def elements(self, step: int, part: ElementRange) -> np.ndarray:
        if not isinstance(part, _MappedRange):
            return self.source.elements(step, part)
        phase, name, use = part.what
        whole = self._rearranged(phase, step, name, use, part.rank)
        return np.ascontiguousarray(whole).reshape(-1)[part.start : part.stop]

    def full(self, phase: str, step: int, name: str, *, use: str = "", replica: int = 0) -> np.ndarray:
        if self._keeps_order(name):
            array = self.source.full(phase, step, self._paths(name)[0], use=use, replica=replica)
            return self._map.by_name[name].to_canonical(array)
        return self._rearranged(phase, step, name, use, replica * self.manifest.mesh.shard)

    def _rearranged(self, phase: str, step: int, name: str, use: str, rank: int) -> np.ndarray:
        """A whole parameter, or a tensor of its shape, of one rank."""
        shared = rank if phase in WHOLE_ON_RANK else rank // self.manifest.mesh.shard
        key = (phase, step, name, use, shared)
        if key not in self._arrays:
            parts = [self._part(phase, step, path, use, rank) for path in self._paths(name)]
            if len(self._arrays) >= _KEPT:
                self._arrays.pop(next(iter(self._arrays)))
            self._arrays[key] = self._map.by_name[name].to_canonical(*parts)
        return self._arrays[key]

    def _part(self, phase: str, step: int, path: str, use: str, rank: int) -> np.ndarray:
        spec = self.source.manifest.params[path]
        if phase in WHOLE_ON_RANK:
            part = self.source.own_range(phase, step, rank, path)
            if part is not None:
                return self.source.elements(step, part).reshape(spec.shape)
        elif self.source.has(phase, step, path, use=use):
            return self.source.full(phase, step, path, use=use, replica=rank // self.manifest.mesh.shard)
        return np.zeros(spec.shape, numpy_dtype(spec.dtype))  # as a gradient of None (R29)

    def sketch(self, phase: str, step: int, name: str, *, use: str = "", replica: int = 0) -> Sketch:
        if not self._keeps_sketches(name):
            raise _sketched(self.source, name)
        return self.source.sketch(phase, step, self._paths(name)[0], use=use, replica=replica)

    def sketch_of(self, step: int, name: str, part: ElementRange) -> Sketch:
        if self._keeps_sketches(name) and not isinstance(part, _MappedRange):
            return self.source.sketch_of(step, self._paths(name)[0], part)
        if part.sketch is not None:
            raise _sketched(self.source, name)
        return sketches_of([self.elements(step, part)], part.start)[0]

    def turn(self, step: int, name: str) -> int:
        return max(self.source.turn(step, path) for path in self._paths(name))

    def state_slots(self, step: int, name: str) -> tuple[str, ...]:
        return tuple(sorted({slot for path in self._paths(name) for slot in self.source.state_slots(step, path)}))

    def count(self, step: int, name: str) -> float | None:
        return next((count for path in self._paths(name) if (count := self.source.count(step, path)) is not None), None)

    # Buffers

    def buffers(self, step: int) -> list[str]:
        """Those of modules that have a counterpart, and of others under their own names."""
        return [_moved(name, self._to_view) for name in self.source.buffers(step)]

    def initial_buffers(self) -> list[str]:
        return [_moved(name, self._to_view) for name in self.source.initial_buffers()]

    def has_buffer(self, step: int, name: str) -> bool:
        return self.source.has_buffer(step, _moved(name, self._to_source))

    def buffer_shape(self, step: int, rank: int, name: str) -> tuple[int, ...]:
        return self.source.buffer_shape(step, rank, _moved(name, self._to_source))

    def buffer(self, step: int, rank: int, name: str) -> np.ndarray | Sketch:
        return self.source.buffer(step, rank, _moved(name, self._to_source))

    # Activations

    def activations(self, step: int) -> list[tuple[int, str, str]]:
        """The activations that have a counterpart, by its name, in the order of the recording."""
        back: dict[Of, list[Of]] = {}
        for of, (theirs, _) in self._given.items():
            back.setdefault(theirs, []).append(of)
        return [
            (microbatch, *of)
            for microbatch, module, use in self.source.activations(step)
            for of in back.get((module, use), ())
            if self._keeps_activation(of) or self.source.activation_sketch(step, 0, microbatch, module, use) is None
        ]

    def _keeps_activation(self, of: Of) -> bool:
        """Whether the sketch of an activation is that of its elements in the view."""
        theirs, form = self._given[of]
        return theirs == of if self.source.manifest.sketches_by_name else form is None

    def disagreements(self, steps: int) -> list[UnequalRanks]:
        """Those of the recording, in its order; a module without a counterpart keeps its name."""
        names = {path: name for name in self.manifest.params for path in self._paths(name)}
        modules = {theirs: of for of, (theirs, _) in self._given.items()}
        found = []
        for each in self.source.disagreements(steps):
            if each.phase == FORWARD:
                found.append(replace(each, name=modules.get((each.name, each.use), (each.name, ""))[0]))
            elif (name := names.get(each.name)) is not None:
                found.append(replace(each, name=name, unit=self.manifest.unit_of[name]))
        return found

    def activation(self, step: int, rank: int, microbatch: int, module: str, use: str) -> np.ndarray:
        of, form = self._given[module, use]
        array = self.source.activation(step, rank, microbatch, *of)
        if form is not None and form.fits(array.shape):
            array = form(array)
        return channels_first(array) if (module, use) in self._moved else array

    def activation_shape(self, step: int, rank: int, microbatch: int, module: str, use: str) -> tuple[int, ...]:
        of, form = self._given[module, use]
        shape = self.source.activation_shape(step, rank, microbatch, *of)
        if form is not None and form.fits(shape):
            shape = form.shape(shape)
        return channels_first_shape(shape) if (module, use) in self._moved else shape

    def activation_order(self, step: int, rank: int, microbatch: int, module: str, use: str) -> Order:
        of, form = self._given[module, use]
        if form is not None or (module, use) in self._moved:
            return Order.TORCH
        return self.source.activation_order(step, rank, microbatch, *of)

    def activation_sketch(self, step: int, rank: int, microbatch: int, module: str, use: str) -> Sketch | None:
        of, _ = self._given[module, use]
        if not self._keeps_activation((module, use)):
            return None  # `activations` has none that is a sketch
        source = self.source.with_channels_first({of} if (module, use) in self._moved else ())
        return source.activation_sketch(step, rank, microbatch, *of)

    def activation_operator(self, step: int, rank: int, microbatch: int, module: str, use: str) -> str:
        return self.source.activation_operator(step, rank, microbatch, *self._given[module, use][0])


def _moved(name: str, modules: Mapping[str, str]) -> str:
    """The name with the longest path of a module that is in the map changed."""
    path = enclosing_unit(name.rpartition(".")[0], modules)
    rest = name.removeprefix(f"{path}.") if path else name
    return ".".join(filter(None, (modules.get(path, path), rest)))


def _modules(param_map: ParamMap, activations: Activations) -> dict[str, str]:
    """The modules of the view with those of the recording, by their parameters and activations, where only one fits."""
    pairs = {(called_module(own[0]), called_module(theirs[0])) for own, (theirs, _) in activations.items()}
    pairs |= {
        (entry.name.rpartition(".")[0], entry.paths[0].rpartition(".")[0])
        for entry in param_map.entries
        if len(entry.paths) == 1
    }
    seen = [Counter(pair[i] for pair in pairs) for i in (0, 1)]
    return {own: theirs for own, theirs in pairs if seen[0][own] == seen[1][theirs] == 1}


def mapped(
    recording: Recording,
    param_map: ParamMap,
    like: Manifest,
    activations: Activations,
    *,
    without: Collection[str] = (),
) -> MappedRecording:
    """A view of a recording whose parameters and modules have the names of another recording.

    Args:
        param_map: names of the other recording, and as paths the names of this one. Parameters that it lacks keep their names.
        like: manifest of the other recording.
        activations: those that have a counterpart.
        without: parameters of this recording that the view lacks.

    Raises:
        MappingError: the map has paths that the recording lacks, or does not fit their shapes.
    """
    params = recording.manifest.params
    if unknown := [path for path in param_map.by_path if path not in params]:
        raise MappingError(
            f"{recording.directory}: the map has paths that are no parameters of this recording: {unknown[:4]}; expected names "
            f"such as {list(params)[:4]}"
        )
    whole = with_identities(param_map, (path for path in params if path not in without))
    manifest = replace(
        recording.manifest,
        param_map=whole,
        units=tuple(_units(recording.manifest, whole, like)),
        settings=_settings(recording.manifest.settings, whole, activations),
    )
    return MappedRecording(recording, manifest, whole, activations)


def with_identities(param_map: ParamMap, paths: Iterable[str]) -> ParamMap:
    """The map, in which those of these paths that it lacks keep their names."""
    others = [path for path in paths if path not in param_map.by_path]
    return ParamMap((*param_map.entries, *identity_map(others).entries))


def _kept(manifest: Manifest, param_map: ParamMap) -> frozenset[str]:
    """The parameters of units whose layout is kept, since only the names of their parameters differ."""
    units = ([param_map.by_path.get(param.name) for param in layout.params] for _, layout in manifest.units)
    kept = (entries for entries in units if all(entry is not None and _is_renaming(entry) for entry in entries))
    return frozenset(entry.name for entries in kept for entry in entries if entry is not None)


def _is_renaming(entry: MapEntry) -> bool:
    return entry.pattern is None and len(entry.paths) == 1


def _units(manifest: Manifest, param_map: ParamMap, like: Manifest) -> Iterable[tuple[str, Layout]]:
    """The units with the names of another recording, the root first."""
    specs = {entry.name: _spec(manifest, entry, like) for entry in param_map.entries}
    kept = _kept(manifest, param_map)
    found: list[tuple[str, Layout]] = []
    for unit, layout in manifest.units:
        names = [entry.name for param in layout.params if (entry := param_map.by_path.get(param.name)) is not None]
        if names and kept.issuperset(names):
            units = {_unit_of(name, like) for name in names}
            params = tuple(specs.pop(name) for name in names)
            found.append((units.pop() if len(units) == 1 else unit, layout_from_json(layout.to_json(), params)))
    by_unit: dict[str, list[ParamSpec]] = {}
    for name, spec in specs.items():
        by_unit.setdefault(_unit_of(name, like), []).append(spec)
    for unit, members in by_unit.items():
        found += [(unit, layout) for layout in layouts_by_rows(members, manifest.mesh.shard)]
    order = {unit: place for place, (unit, _) in reversed(list(enumerate(like.units)))}
    return sorted(found, key=lambda each: order.get(each[0], len(order)))


def _unit_of(name: str, like: Manifest) -> str:
    if name in like.unit_of:
        return like.unit_of[name]
    return enclosing_unit(name.rpartition(".")[0], like.unit_names)


def _spec(manifest: Manifest, entry: MapEntry, like: Manifest) -> ParamSpec:
    specs = [manifest.params[path] for path in entry.paths]
    other = like.params.get(entry.name)
    aliases = other.aliases if other is not None and any(spec.aliases for spec in specs) else ()
    return ParamSpec(
        entry.name,
        entry.canonical_shape(*(spec.shape for spec in specs)),
        specs[0].dtype,
        aliases,
        all(spec.requires_grad for spec in specs),
    )


def _settings(settings: Mapping[str, Any], param_map: ParamMap, activations: Activations) -> dict[str, Any]:
    """The settings with the names of parameters and modules changed."""
    found = dict(settings)
    if groups := settings.get(GROUPS):
        found[GROUPS] = [group | {"params": _names_in(group["params"], param_map)} for group in groups]
    if modules := settings.get(PER_RANK):
        back = {called_module(theirs[0]): called_module(ours[0]) for ours, (theirs, _) in activations.items()}
        found[PER_RANK] = [back.get(module, module) for module in modules]
    return found


def _names_in(paths: Collection[str], param_map: ParamMap) -> list[str]:
    return [entry.name for entry in param_map.entries if set(entry.paths) & set(paths)]


def _sketched(recording: Recording, name: str) -> RecordingError:
    return RecordingError(
        f"{recording.directory}: {name!r} was recorded as a sketch, which depends on the order of its elements and, up to format "
        "6, on its name; record again in full (--detail full, or detail='full'), or with the map (Recorder(..., "
        "param_map=ParamMap.load(...)))"
    )
