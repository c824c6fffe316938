"""Adds pairs of parameters with the order of their dims, which values, gradients or the other parameters of a module show."""

import math
from typing import Any

import numpy as np

from crossframe.alignment.matching import FAR, NEAR, SAMPLES, Matching, num_wide, relative_distance
from crossframe.alignment.module_names import kind_of, module_of
from crossframe.alignment.portions import bias_text
from crossframe.alignment.sampled import order_of
from crossframe.alignment.solve import rearrangements, solve, solve_blocks
from crossframe.alignment.summary import Summary, varies
from crossframe.param_map import MapEntry
from crossframe.rearrange import Rearrangement

_PROBES = 1 << 16
"""The number of places at which a rearrangement is tested for whether it changes the order."""


def pair(matching: Matching, name: str, path: str, evidence: str) -> bool:
    """Add one parameter, if a rearrangement of its dims is known."""
    found = _rearrangement(matching, name, path)
    if found is not None:
        array, other = matching.first[name], matching.second[path]
        sampled = matching.summarized and varies(array) and not array.sketch.equals(other.sketch)
        matching.add(MapEntry(name, path, None if found.is_identity else found.text), SAMPLES if sampled else evidence)
    return found is not None


def permute_blocks(matching: Matching) -> None:
    """Add parameters of which blocks, such as gates, have another order: the same one in all layers, since values of one layer
    may have been exchanged."""
    found: dict[str, list[MapEntry]] = {}
    for names, paths in matching.groups():
        name, path = names[0], paths[0]
        if len(names) == len(paths) == 1:
            form = solve_blocks(matching.first[name], matching.second[path])
            found.setdefault(kind_of(name), []).extend([MapEntry(name, path, form.text)] if form else [])
    decided = {kind_of(name) for name in matching.entries}
    for kind, entries in found.items():
        if kind not in decided and len({entry.pattern for entry in entries}) == 1:
            matching.add_verified(entries)


def _rearrangement(matching: Matching, name: str, path: str) -> Rearrangement | None:
    """That of the values. If these fit several: the one that the gradients fit, or that joins or permutes dims as another
    parameter of the same module does."""
    array, other = matching.first[name], matching.second[path]
    found = _solved(array, other)
    if found is None or varies(array):
        return found
    if num_wide(array.shape) == num_wide(other.shape) == 1:
        return _order_of_bias(matching, name, path, found)
    fits = list(rearrangements(array.shape, other.shape))
    if len(fits) == 1:
        return found
    distances = [distance(matching, name, path, each) for each in fits]
    near = [each for each, distance in zip(fits, distances, strict=True) if distance < NEAR]
    if len(near) == 1 and sum(distance > FAR for distance in distances) == len(fits) - 1:
        return near[0]
    known = _joins_in_module(matching, name)
    alike = [each for each in fits if (joins := each.joins(other.shape)) and joins <= known]
    return alike[0] if len(alike) == 1 else None


def _solved(array: Any, other: Any) -> Rearrangement | None:
    """The rearrangement between two parameters with the same elements."""
    if not isinstance(array, Summary):
        return solve(array, other)
    if varies(array):
        return order_of(array, other)
    return next(rearrangements(array.shape, other.shape), None)


def _order_of_bias(matching: Matching, name: str, path: str, unchanged: Rearrangement) -> Rearrangement | None:
    """That of an array with one value and one wide dim, which is permuted as the weights of its module are; None if these
    have several such dims, and gradients do not tell which one it belongs to."""
    places = np.arange(matching.second[path].size).reshape(matching.second[path].shape)
    fits: dict[bytes, Rearrangement] = {}  # by the order of elements that they give
    for entry in matching.entries.values():
        is_sibling = module_of(entry.name) == module_of(name) and module_of(entry.paths[0]) == module_of(path)
        if not is_sibling or len(entry.paths) > 1 or entry.selects or entry.pads:
            continue
        weight = matching.first[entry.name]
        pattern = entry.pattern or Rearrangement.transposing(tuple(range(weight.ndim))).text
        for dim, size in enumerate(weight.shape):
            text = bias_text(pattern, places.ndim, dim=dim, after=True) if size == places.size else None
            if text is not None and matching.fits_shape(MapEntry(name, path, text)):
                form = Rearrangement(text)
                fits.setdefault(form(places).tobytes(), form)
    same = unchanged(places).tobytes()
    if fits.keys() <= {same}:
        return unchanged
    if len(fits) == 1:
        return next(iter(fits.values()))
    near = [form for form in fits.values() if distance(matching, name, path, form) < NEAR]
    return near[0] if len(near) == 1 else None


def _joins_in_module(matching: Matching, name: str) -> set[tuple[tuple[int, int], ...]]:
    """How other parameters of a module join dims."""
    module = module_of(name)
    entries = [entry for entry in matching.entries.values() if module_of(entry.name) == module and entry.pattern]
    return {
        join
        for entry in entries
        for join in Rearrangement(entry.pattern or "").joins(matching.second[entry.paths[0]].shape)
    }


def distance(matching: Matching, name: str, path: str, found: Rearrangement) -> float:
    """The relative distance of the gradients; NaN if one is missing or zero."""
    gradient, other = matching.gradients[0].get(name), matching.gradients[1].get(path)
    if gradient is None or other is None:
        return math.nan
    if isinstance(other, Summary):
        if not isinstance(gradient, Summary):
            return relative_distance(found.inverse(gradient), other)
        probes = np.arange(min(other.size, _PROBES))
        in_order = np.array_equal(found.places(other.shape, probes), probes)
        return relative_distance(gradient, other) if in_order else math.nan
    return relative_distance(gradient, found(other))


def is_near(matching: Matching, name: str, path: str) -> bool:
    array, other = matching.first[name], matching.second[path]
    return any(distance(matching, name, path, each) < NEAR for each in rearrangements(array.shape, other.shape))
