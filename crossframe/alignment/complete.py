"""Completes an alignment by structure, for models of which some parameters have wrong values.

A derived map is checked on all values, so it lacks the parameters whose values differ. To compare two runs these are
needed too: a parameter corresponds as its counterparts in other layers do, or to the only one that is left.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from crossframe.alignment.align import Alignment
from crossframe.alignment.matching import Arrays, fits_shape
from crossframe.alignment.module_names import INDEX, kind_of
from crossframe.param_map import MapEntry, ParamMap


def complete(found: Alignment, first: Arrays, second: Arrays) -> tuple[ParamMap, tuple[str, ...]]:
    """The map with further entries, and the names of these.

    Args:
        first, second: the values that were aligned.
    """
    entries = {entry.name: entry for entry in found.param_map.entries}
    added: list[str] = []
    for name in first:
        if name not in entries and (entry := _as_in_other_layers(name, entries, first, second)) is not None:
            entries[name] = entry
            added.append(name)
    owned = {path for entry in entries.values() for path in entry.paths}
    names, paths = [name for name in first if name not in entries], [path for path in second if path not in owned]
    if len(names) == len(paths) == 1 and (entry := _alone(names[0], paths[0], entries, first, second)) is not None:
        entries[names[0]] = entry
        added.append(names[0])
    return ParamMap(tuple(entries[name] for name in first if name in entries)), tuple(added)


def unlike_other_layers(param_map: ParamMap) -> tuple[str, ...]:
    """The parameters that are elsewhere than the same parameters of most other layers: values may have been exchanged.

    >>> rows = [("h.0.q", "l.0.q"), ("h.1.q", "l.1.k"), ("h.2.q", "l.2.q")]
    >>> unlike_other_layers(ParamMap(tuple(MapEntry(*row) for row in rows)))
    ('h.1.q',)
    """
    by_kind: dict[str, list[MapEntry]] = {}
    for entry in param_map.entries:
        by_kind.setdefault(kind_of(entry.name), []).append(entry)
    found = []
    for entries in by_kind.values():
        (usual, count), *_ = Counter(map(_place, entries)).most_common(1)
        if 2 * count > len(entries):
            found += [entry.name for entry in entries if _place(entry) != usual]
    return tuple(found)


def _place(entry: MapEntry) -> tuple[object, ...]:
    """Where a parameter is, relative to its layer."""
    own = [int(index) for index in INDEX.findall(entry.name)]
    texts = [*entry.paths, entry.pattern or ""]
    found: list[object] = []
    for text in texts:
        indices = [int(index) for index in INDEX.findall(text)]
        found += [kind_of(text), *(index - own[min(k, len(own) - 1)] for k, index in enumerate(indices) if own)]
    return tuple(found)


def _as_in_other_layers(name: str, entries: Mapping[str, MapEntry], first: Arrays, second: Arrays) -> MapEntry | None:
    """The entry of a parameter after those of the same parameter in other layers; None if there are none, or several ways."""
    kind, own = kind_of(name), INDEX.findall(name)
    selected = {(path, entry.pattern) for entry in entries.values() if entry.selects for path in entry.paths}
    owned = {path for entry in entries.values() if not entry.selects for path in entry.paths}
    possible: dict[MapEntry, None] = {}
    for other in entries.values():
        if kind_of(other.name) != kind or not own:
            continue
        moved = list(zip(INDEX.findall(other.name), own, strict=True))
        by_index = dict(moved)
        if any(by_index[old] != new for old, new in moved):
            continue

        def shifted(text: str, by_index: dict[str, str] = by_index) -> str:
            return INDEX.sub(lambda index: by_index.get(index[0], index[0]), text)

        paths = tuple(map(shifted, other.paths))
        pattern = None if other.pattern is None else shifted(other.pattern)
        entry = replace(other, name=name, path=paths if isinstance(other.path, tuple) else paths[0], pattern=pattern)
        is_free = not any((path, pattern) in selected if entry.selects else path in owned for path in paths)
        if is_free and fits_shape(entry, first, second):
            possible[entry] = None
    return next(iter(possible)) if len(possible) == 1 else None


def _alone(name: str, path: str, entries: Mapping[str, MapEntry], first: Arrays, second: Arrays) -> MapEntry | None:
    """The entry of the only parameter that is left, with the pattern that most parameters of its shapes have."""
    num_dims = first[name].ndim, second[path].ndim
    alike = [
        entry.pattern
        for entry in entries.values()
        if len(entry.paths) == 1
        and not entry.reorders
        and (first[entry.name].ndim, second[entry.paths[0]].ndim) == num_dims
    ]
    for pattern in sorted(dict.fromkeys([*alike, None]), key=alike.count, reverse=True):
        entry = MapEntry(name, path, pattern)
        if not entry.selects and not entry.pads and fits_shape(entry, first, second):
            return entry
    return None
