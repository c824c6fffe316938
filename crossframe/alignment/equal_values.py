"""Tells parameters with equal values apart: by gradients, by their modules, by the order of use, and by names."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from crossframe.alignment.matching import (
    FAR,
    GRADIENTS,
    MODULES,
    NAMES,
    SIMILAR,
    USE,
    VALUES,
    Matching,
    num_wide,
    same_value,
)
from crossframe.alignment.module_names import enclosing, first_part, is_in, kind_of, module_of
from crossframe.alignment.order_of_dims import is_near, pair
from crossframe.alignment.portions import bias_text
from crossframe.alignment.summary import Summary, varies
from crossframe.param_map import MapEntry
from crossframe.rearrange import Rearrangement
from crossframe.recording.sketch import sketches_of

_MOST_OF_LAYER = 4
"""The largest number of parameters of a layer of which all orders are tried."""


def join_bias(matching: Matching, name: str) -> bool:
    """Add a parameter with one value that joins arrays as another one of its module does."""
    module = module_of(name)
    siblings = [
        entry for entry in matching.entries.values() if len(entry.paths) > 1 and module_of(entry.name) == module
    ]
    for sibling in siblings:
        found = (_sibling_of(matching, matching.first[name], path) for path in sibling.paths)
        paths = tuple(path for path in found if path is not None)
        if len(paths) < len(sibling.paths):
            continue
        pattern, num_dims = sibling.pattern, matching.second[paths[0]].ndim
        if pattern is not None:
            pattern = bias_text(pattern, num_dims, dim=Rearrangement(pattern).joint_dim, after=True)
        if (pattern is not None or num_dims == 1) and matching.fits(
            entry := MapEntry(name, paths, pattern, sibling.rows)
        ):
            return matching.add_verified([entry], MODULES)
    return False


def _sibling_of(matching: Matching, array: np.ndarray, path: str) -> str | None:
    """The only open array in the module of a path with the only value of another array."""
    inside = [
        other
        for other in matching.open_paths()
        if module_of(other) == module_of(path) and same_value(matching.second[other], array)
    ]
    return inside[0] if len(inside) == 1 else None


def split_bias(matching: Matching, path: str) -> bool:
    """Add parameters with one value that are portions of an array as others of its module are."""
    module, array = module_of(path), matching.second[path]
    siblings = [entry for entry in matching.entries.values() if entry.selects and module_of(entry.paths[0]) == module]
    entries = []
    for sibling in siblings:
        names = [
            name
            for name in matching.open_names()
            if module_of(name) == module_of(sibling.name) and same_value(matching.first[name], array)
        ]
        assert sibling.pattern is not None
        form = Rearrangement(sibling.pattern)
        texts = (bias_text(sibling.pattern, array.ndim, dim=dim, after=False) for dim in range(len(form.left)))
        fits = [
            entry
            for text in texts
            if text and len(names) == 1 and matching.fits(entry := MapEntry(names[0], path, text)) and entry.selects
        ]
        if len(fits) != 1:
            return False
        entries.append(fits[0])
    return bool(entries) and matching.add_verified(entries, MODULES)


def by_gradients_or_modules(matching: Matching, names: Sequence[str], paths: Sequence[str]) -> bool:
    """Add the parameters of a group that gradients or modules tell apart; whether there was one."""
    decided = False
    for name in names:
        free = [path for path in paths if path not in matching.owners]
        near = [path for path in free if is_near(matching, name, path)]
        if len(near) == 1 and sum(is_near(matching, other, near[0]) for other in names) == 1:
            decided |= pair(matching, name, near[0], GRADIENTS)
            continue
        there = _of_module(matching, name, names, free)
        if there is not None:
            decided |= pair(matching, name, there, MODULES)
    return decided


def _of_module(matching: Matching, name: str, names: Sequence[str], paths: Sequence[str]) -> str | None:
    """The only one of these paths in the module of a name, if it is the only one of these names there."""
    for module in enclosing(name):
        known = {each for each in matching.entries if is_in(each, module)}
        alike = [other for other in names if other not in matching.entries and is_in(other, module)]
        if not known or any(is_in(each, module) for each in matching.open_varied[0]):
            continue
        wanted = {path for each in known for path in matching.entries[each].paths}
        modules = {there for path in wanted for there in enclosing(path)}
        for there in sorted(modules, key=len, reverse=True):
            inside = [path for path in paths if is_in(path, there)]
            owned = {path for path in matching.owners if is_in(path, there)}
            owners = {name for path in owned for name in matching.owners[path]}
            unknown = any(is_in(path, there) for path in matching.open_varied[1])
            if owners == known and owned == wanted and not unknown and len(inside) == len(alike) == 1:
                return inside[0]
    return None


def last_of_values(matching: Matching, names: Sequence[str], paths: Sequence[str]) -> bool:
    """Add the parameter of an array that is the only one left of those with its values; whether there was one."""
    # Tied names, of which the first one has the array.
    is_owner = len(names) == 1 or (len(names) > 1 and varies(matching.first[names[0]]))
    return is_owner and len(paths) == 1 and pair(matching, names[0], paths[0], VALUES)


def by_similar_gradients(matching: Matching, names: Sequence[str], paths: Sequence[str]) -> bool:
    """Add the parameters whose gradients are more similar to each other than to all others; whether there was one.

    A fault changes gradients less than another parameter does. Gradients of all of them may be similar, such as those of the
    norms of queries and keys: a pair is not added if an exchange with another pair makes the two pairs together more similar.
    """
    names = [name for name in names if name in matching.gradients[0]]
    paths = [path for path in paths if path in matching.gradients[1]]
    if not names or not paths or any(num_wide(matching.first[name].shape) > 1 for name in names):
        return False  # of several dims the order is open too
    given = [matching.gradients[0][name] for name in names], [matching.gradients[1][path] for path in paths]
    apart = 1 - np.matmul(*_directions(*given))
    decided = False
    for i, name in enumerate(names):
        j = int(apart[i].argmin())
        others = np.append(np.delete(apart[i], j), np.delete(apart[:, j], i))
        exchanged = apart[i][None, :] + apart[:, j][:, None]
        is_best = np.delete(np.delete(apart[i, j] + apart <= exchanged, i, 0), j, 1).all()
        if apart[i, j] < FAR * others.min(initial=1.0) and is_best:
            decided |= pair(matching, name, paths[j], SIMILAR)
    return decided


def by_similar_gradients_of_layers(matching: Matching, names: Sequence[str], paths: Sequence[str]) -> bool:
    """Add the parameters of layers, such as the norms of queries and keys, whose gradients over all layers together are more
    similar in one order of a layer's parameters than in any other; whether there were any.

    In one layer they may be similar in each order. All layers of a model have their parameters in one order.
    """
    names = [name for name in names if name in matching.gradients[0]]
    paths = [path for path in paths if path in matching.gradients[1]]
    if any(num_wide(matching.first[name].shape) > 1 for name in names):
        return False
    by_kinds: dict[tuple[tuple[str, ...], ...], list[tuple[list[str], list[str]]]] = {}
    for layer in _layers(matching, names, paths):
        kinds = tuple(tuple(map(kind_of, side)) for side in layer)
        if 1 < len(kinds[0]) == len(kinds[1]) <= _MOST_OF_LAYER and all(len({*side}) == len(side) for side in kinds):
            by_kinds.setdefault(kinds, []).append(layer)
    decided = False
    for layers in by_kinds.values():
        gradients = (
            ([matching.gradients[0][name] for name in ours], [matching.gradients[1][path] for path in theirs])
            for ours, theirs in layers
        )
        apart = np.mean([1 - np.matmul(*_directions(*given)) for given in gradients], axis=0)
        orders = sorted(
            (float(np.mean([apart[i, j] for i, j in enumerate(order)])), order)
            for order in itertools.permutations(range(len(apart)))
        )
        if len(layers) > 1 and orders[0][0] < FAR * min(orders[1][0], 1.0):
            for ours, theirs in layers:
                for name, j in zip(ours, orders[0][1], strict=True):
                    decided |= pair(matching, name, theirs[j], SIMILAR)
    return decided


def _layers(matching: Matching, names: Sequence[str], paths: Sequence[str]) -> list[tuple[list[str], list[str]]]:
    """The open parameters of each pair of modules that enclose the same aligned ones, sorted by name."""
    sides: list[dict[tuple[str, ...], list[str]]] = []
    for group, known in ((names, matching.entries), (paths, matching.owners)):
        by_module: dict[str, list[str]] = {}
        for each in sorted(group):
            if (module := _enclosing_known(matching, each, known)) is not None:
                by_module.setdefault(module, []).append(each)
        found: dict[tuple[str, ...], list[str]] = {}
        for module, own in by_module.items():
            inside = [each for each in known if is_in(each, module)]
            aligned = inside if known is matching.entries else [n for path in inside for n in matching.owners[path]]
            found[tuple(sorted(aligned))] = own
        sides.append(found)
    return [(own, sides[1][aligned]) for aligned, own in sides[0].items() if aligned in sides[1]]


def by_order_of_use(matching: Matching, names: Sequence[str], paths: Sequence[str]) -> bool:
    """Add the parameters whose modules are used after the same aligned ones, if there is one of them in each model; whether
    there was one.

    A fault changes values, but seldom the order in which modules are used. When a parameter is used that a module holds beside
    modules of its own, such as a table of positions, is not known.
    """
    places = [_places_of_leaves(each) for each in matching.places]
    ours, theirs = (
        {each: place for each in group if (place := places[i].get(module_of(each))) is not None}
        for i, group in enumerate((names, paths))
    )
    known: tuple[dict[str, int], dict[str, int]] = {}, {}
    for name, entry in matching.entries.items():
        own = places[0].get(module_of(name))
        others = [place for path in entry.paths if (place := places[1].get(module_of(path))) is not None]
        if own is not None and len(others) == len(entry.paths):
            known[0][name], known[1][name] = own, min(others)
    # By each open parameter: the aligned ones that are used before it, and the last of them.
    before = [
        {each: _used_before(known[i], place) for each, place in side.items()} for i, side in enumerate((ours, theirs))
    ]
    decided = False
    for name, (earlier, last) in before[0].items():
        alike = [
            [each for each, (all_, latest) in side.items() if all_ == earlier and last & latest] for side in before
        ]
        if earlier and len(alike[0]) == len(alike[1]) == 1:
            decided |= pair(matching, name, alike[1][0], USE)
    return decided


def _places_of_leaves(places: Mapping[str, int]) -> dict[str, int]:
    """The places of the modules that contain no other one which is used."""
    outer = {module for each in places for module in ("", *enclosing(each)) if each}
    return {module: place for module, place in places.items() if module not in outer}


def _used_before(known: Mapping[str, int], place: int) -> tuple[frozenset[str], frozenset[str]]:
    """The names whose place is before another one, and those of them at the last place."""
    earlier = {name: own for name, own in known.items() if own < place}
    last = max(earlier.values(), default=None)
    return frozenset(earlier), frozenset(name for name, own in earlier.items() if own == last)


def by_names(matching: Matching, names: Sequence[str], paths: Sequence[str]) -> bool:
    """Add the parameters that have the same name in modules that enclose the same aligned parameters; whether there was
    one."""
    inside = [
        [(each, module) for each in group if (module := _enclosing_known(matching, each, known)) is not None]
        for group, known in ((names, matching.entries), (paths, matching.owners))
    ]
    decided = False
    for name, module in inside[0]:
        known = {each for each in matching.entries if is_in(each, module)}
        own = first_part(name, module)
        twice = [each for each, other in inside[0] if other == module and first_part(each, other) == own]
        there = [
            path
            for path, other in inside[1]
            if first_part(path, other) == own
            and {each for p in matching.owners if is_in(p, other) for each in matching.owners[p]} == known
        ]
        if len(twice) == len(there) == 1:
            decided |= pair(matching, name, there[0], NAMES)
    return decided


def _enclosing_known(matching: Matching, name: str, known: Iterable[str]) -> str | None:
    """The innermost module that encloses a parameter and an aligned one."""
    return next((module for module in enclosing(name) if any(is_in(each, module) for each in known)), None)


def _directions(ours: Sequence[Any], theirs: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of one size as rows, and others as columns, of norm 1, or 0 if they are zero. If one of them is a summary, they
    are the sums of sketches."""
    both = [*ours, *theirs]
    if any(isinstance(each, Summary) for each in both):
        sketches = [each.sketch if isinstance(each, Summary) else sketches_of([each])[0] for each in both]
        num_sums = min(each.sums.size for each in sketches)
        rows = np.stack([each.folded(num_sums).sums for each in sketches])
    else:
        rows = np.stack([each.astype(np.float64).reshape(-1) for each in both])
    rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float64).tiny)
    return rows[: len(ours)], rows[len(ours) :].T
