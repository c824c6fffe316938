"""Gives two recordings the same names, if their parameters have different ones.

The names are those of torch, or of the first recording, or those of the other one if only these can be mapped. The map between
the parameters is the user's, or else it is derived from the initial values of both recordings (`crossframe.alignment`). It gives
them the same shapes too: parameters with equal names may have further dims of size 1, or dims in another order.
"""

import functools
import itertools
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass, replace

from crossframe.alignment import NAMES, SIMILAR, USE, Alignment, align, complete, match_activations, unlike_other_layers
from crossframe.alignment.models import read_recordings
from crossframe.alignment.solve import rearrangements
from crossframe.errors import MappingError, RecordingError
from crossframe.param_map import MapEntry, ParamMap
from crossframe.quoting import quote, quote_error
from crossframe.rearrange import Rearrangement
from crossframe.recording import Recording
from crossframe.recording.event_format import PARAMETERS
from crossframe.recording.known_settings import NOT_RECORDED
from crossframe.recording.mapped_recording import MappedRecording, Of, mapped, with_identities
from crossframe.recording.unused_params import unused_params
from crossframe.verdict.measure.comparable import labels

_MOST = 3
"""The number of undecided parameters that are named."""


@dataclass(frozen=True)
class OneNaming:
    """Two recordings with the same names.

    Attributes:
        a, b: the recordings, one of them a view if their names differ.
        note: how the names were matched, as a sentence; "" if they are the same.
        unrecorded: which parameters one side alone has recorded, as a sentence; "" if there are none.
        problem: why they could not be matched, as a clause, or "".
    """

    a: Recording
    b: Recording
    note: str = ""
    unrecorded: str = ""
    problem: str = ""


@functools.lru_cache(maxsize=4)
def in_one_naming(a: Recording, b: Recording, param_map: ParamMap | None = None) -> OneNaming:
    """Views of two recordings whose parameters and modules have the same names.

    Args:
        param_map: names of one recording, and as paths the names of the other one; None: the map of the parameters that the
            recordings do not share by name is derived from the initial values. If they share fewer than half of their names, it
            is derived for all.

    Raises:
        MappingError: the map does not fit the recordings.
    """
    sides, texts = [], []
    for i, (own, other) in enumerate(((a, b), (b, a))):
        unrecorded = set(other.manifest.settings.get(NOT_RECORDED) or ()) - other.manifest.params.keys()
        lost = [name for name in own.manifest.params if name in unrecorded]
        sides.append(_without(own, lost) if lost else own)
        if lost:
            are = "is" if len(lost) == 1 else "are"
            texts.append(f"{_listed(lost)}, which {labels(a, b)[1 - i]} did not record, {are} not compared")
    for i in range(2) if param_map is None else ():
        alone = [name for name in sides[i].manifest.params if name not in sides[1 - i].manifest.params]
        # Other names may stand for the same parameters.
        has_all = len(alone) + len(sides[1 - i].manifest.params) == len(sides[i].manifest.params)
        if alone and has_all and unused_params(sides[i], alone) == tuple(alone):
            are = "is" if len(alone) == 1 else "are"
            texts.append(f"{_listed(alone)}, which {labels(a, b)[i]} alone has and does not train, {are} not compared")
            sides[i] = _without(sides[i], alone)
    a, b = sides
    naming = _by_map(a, b, param_map) if param_map is not None else _by_names_or_values(a, b)
    return replace(naming, unrecorded="; ".join(texts))


def _without(recording: Recording, names: Collection[str]) -> Recording:
    """A view without some parameters."""
    same = {(module, use): ((module, use), None) for module, use in _activations_of(recording)}
    return mapped(recording, ParamMap(()), recording.manifest, same, without=names)


def _by_names_or_values(a: Recording, b: Recording) -> OneNaming:
    ours, theirs = a.manifest.params.keys(), b.manifest.params.keys()
    shared = ours & theirs
    are_same = ours <= theirs or theirs <= ours
    are_few = not are_same and 2 * len(shared) < min(len(ours), len(theirs))
    are_rearranged = not are_few and any(_is_rearranged(a, b, name) for name in shared)
    swapped = a.manifest.framework != "torch" == b.manifest.framework
    if are_same and not are_rearranged:
        is_reshaped = any(_ones_between(a, b, name) is not None for name in shared)
        sides = (b, a) if swapped else (a, b)
        return _viewed(*sides, ParamMap(()), swapped=swapped) if is_reshaped else OneNaming(a, b)
    known = frozenset() if are_few or are_rearranged else shared
    same = shared if are_rearranged else frozenset()
    problem, rearranged = "", ""
    # With the names of one model there may be no map where there is one with those of the other (`align_either_way`).
    for swaps in (swapped, not swapped):
        first, second = (b, a) if swaps else (a, b)
        try:
            param_map, note = _derived(first, second, known, same)
        except MappingError as error:
            problem = problem or str(error)
        except RecordingError as error:
            problem = problem or f"the parameters have different names; {_HELP}: {quote_error(error)}"
        else:
            lost = _rearranged_sketches(second, param_map)
            if not lost:
                return _viewed(first, second, param_map, swapped=swaps, note=note)
            rearranged = rearranged or f"{note}, but {lost}"
    is_golden = not are_same and (a.golden is not None or b.golden is not None)
    return OneNaming(a, b, problem=rearranged or (problem if are_few or is_golden else ""))


def _ones_between(first: Recording, second: Recording, name: str) -> MapEntry | None:
    """The entry of a parameter of both recordings whose shapes differ in dims of size 1 alone; None if they do not."""
    ours, theirs = (recording.manifest.params[name].shape for recording in (first, second))
    form = Rearrangement.with_ones(theirs, ours) if ours != theirs else None
    return None if form is None else MapEntry(name, name, form.text)


def _is_rearranged(a: Recording, b: Recording, name: str) -> bool:
    """Whether a parameter of both recordings has as many elements in another shape, other than by dims of size 1."""
    ours, theirs = (recording.manifest.params[name] for recording in (a, b))
    return ours.shape != theirs.shape and ours.numel == theirs.numel and _ones_between(a, b, name) is None


def _derived(first: Recording, second: Recording, known: Set[str], same: Set[str]) -> tuple[ParamMap, str]:
    """The map of the parameters, and how they were matched, as a sentence.

    Args:
        known: names of parameters that are the same in both recordings, which the map lacks.
        same: names of parameters that have the same name in both recordings, and dims in another order.

    Raises:
        MappingError: not all of them are decided.
        RecordingError: a recording without values.
    """
    sides = [
        [{name: array for name, array in arrays.items() if name not in known} for arrays in model]
        for model in read_recordings(first, second)
    ]
    (values, gradients), (other_values, other_gradients) = sides
    uses = _modules_in_use(first), _modules_in_use(second)
    found = align(values, other_values, (gradients, other_gradients), may_differ=True, uses=uses, same=same)
    # Without shared names, a few parameters with other values are faults of one model.
    param_map, added = (found.param_map, ()) if known else complete(found, values, other_values)
    alone = [name for name in values if name in same and name not in param_map.by_name]
    if entries := [entry for name in alone if (entry := _by_shape(first, second, found, name)) is not None]:
        param_map, added = ParamMap((*param_map.entries, *entries)), (*added, *(entry.name for entry in entries))
    by = {
        text: [name for name, each in found.evidence.items() if each == evidence] for evidence, text in _WEAKER.items()
    }
    num, num_all = len(found.param_map.entries) - sum(map(len, by.values())), len(values)
    lacking = [
        [name for name in side if name not in matched]
        for side, matched in ((values, param_map.by_name), (other_values, param_map.by_path))
    ]
    idle = [unused_params(recording, side) for recording, side in zip((first, second), lacking, strict=True)]
    if any(len(unused) < len(side) for unused, side in zip(idle, lacking, strict=True)) or 2 * num < num_all:
        open_ones = _listed([", ".join((*each.names, *each.paths)) for each in found.undecided])
        if first.golden is not None or second.golden is not None:
            raise MappingError(
                f"parameters were renamed, fused or split, and the initial values match {num} of {num_all}; other initial "
                f"values, or values that do not tell which is which, are those of {open_ones}; {_FOR_GOLDENS}"
            )
        raise MappingError(
            f"the parameters have different names, and their values match {num} of {num_all}; undecided are {open_ones}; {_HELP}"
        )
    unchanged = [entry.name for entry in found.param_map.entries if entry == MapEntry(entry.name, entry.name)]
    num -= sum(name in same and found.evidence[name] not in _WEAKER for name in unchanged)
    text = f"{num} parameters with other names{' or shapes' if same else ''} were matched by their values"
    if num == 1:
        text = f"1 parameter with another name{' or shape' if same else ''} was matched by its values"
    others = f", {len(added)} by their place since their values differ or are equal ({_listed(added)})" if added else ""
    for how, names in by.items():
        others += f", {len(names)} with equal values by {how} ({_listed(names)})" if names else ""
    if reordered := [entry.name for entry in param_map.entries if entry.reorders]:
        others += f"; blocks of {_listed(reordered)} come in another order, as gates do, or were exchanged"
    if odd := unlike_other_layers(param_map):
        others += (
            f"; unlike in other layers, {_listed(odd)} has the values of other paths, which may have been exchanged"
        )
    return param_map, f"{text}{others}; the names are those of {labels(first, second)[0]}; see crossframe map"


_WEAKER = {USE: "their order of use", SIMILAR: "the direction of their gradients", NAMES: "their names"}
_HELP = (
    "crossframe map lists what would decide them and writes a map that can be edited, for crossframe compare --map; models "
    "with other initial values need a map"
)
_FOR_GOLDENS = (
    "if a run that was recorded in full (--detail full) shows the same, and this is intended, record the golden again with "
    "crossframe baseline update"
)


def _by_shape(first: Recording, second: Recording, found: Alignment, name: str) -> MapEntry | None:
    """The entry of a parameter with the same name and other values, if its shapes allow only one order of dims."""
    if any(name in each.names and name in each.paths for each in found.undecided):
        return None  # the same values, in an order that is not known
    ours, theirs = (recording.manifest.params[name].shape for recording in (first, second))
    forms = list(itertools.islice(rearrangements(ours, theirs), 2))
    if len(forms) != 1:
        return None
    return MapEntry(name, name, None if forms[0].is_identity else forms[0].text)


def _rearranged_sketches(recording: Recording, param_map: ParamMap) -> str:
    """Why a view of a recording by this map could not be compared, as a clause; "" if it can be."""
    found = [
        entry
        for entry in param_map.entries
        if not entry.keeps_order and any(recording.is_sketched(PARAMETERS, 0, path) for path in entry.paths)
    ]
    if not found:
        return ""
    name, how = found[0].name, found[0].pattern or "joined"
    return (
        f"{len(found)} of {len(param_map.entries)} parameters are rearranged (such as {name!r}: {how}), and "
        f"{recording.directory} has sketches of them, which depend on the order of elements; record it with the map of "
        "crossframe map --output (Recorder(..., param_map=ParamMap.load(...)) in JAX), or in full (--detail full)"
    )


def _modules_in_use(recording: Recording) -> tuple[str, ...]:
    """The modules of the first step in the order in which they are first used."""
    return tuple(dict.fromkeys(module for _, module, _ in recording.activations(0)))


def _by_map(a: Recording, b: Recording, param_map: ParamMap) -> OneNaming:
    sides = [recording.manifest.params.keys() for recording in (a, b)]
    names, paths = param_map.by_name.keys(), param_map.by_path.keys()
    if names <= sides[0] and paths <= sides[1]:
        return _viewed(a, b, param_map, swapped=False, note=_GIVEN.format(labels(a, b)[0]))
    if names <= sides[1] and paths <= sides[0]:
        return _viewed(b, a, param_map, swapped=True, note=_GIVEN.format(labels(a, b)[1]))
    unknown = sorted(names - sides[0]), sorted(paths - sides[1])
    what = f"names {quote(unknown[0][:_MOST])}" if unknown[0] else f"paths {quote(unknown[1][:_MOST])}"
    recording = a if unknown[0] else b
    raise MappingError(
        f"the map has {what}, which {recording.directory} lacks; expected names such as "
        f"{quote(list(recording.manifest.params)[:_MOST])}"
    )


_GIVEN = "the names are those of {}, by the given map"


def _viewed(first: Recording, second: Recording, param_map: ParamMap, *, swapped: bool, note: str = "") -> OneNaming:
    """Views in the names and shapes of the first recording, without padding and parameters without gradients that only one of
    them has."""
    both = (name for name in second.manifest.params if name in first.manifest.params)
    others = (name for name in both if name not in param_map.by_name and name not in param_map.by_path)
    if reshaped := [entry for name in others if (entry := _ones_between(first, second, name)) is not None]:
        text = (
            f"{_listed([entry.name for entry in reshaped])}: the shapes differ in dims of size 1 alone, and those of "
            f"{labels(first, second)[0]} are used"
        )
        note = f"{note}; {text}" if note else text
        param_map = ParamMap((*param_map.entries, *reshaped))
    padded = [entry for entry in param_map.entries if entry.pads]
    if padded:
        own = ParamMap(tuple(entry.trimming(first.manifest.params[entry.name].shape) for entry in padded))
        same = {(module, use): ((module, use), None) for module, use in _activations_of(first)}
        first = mapped(first, own, first.manifest, same)
        param_map = ParamMap(tuple(entry.unpadded() for entry in param_map.entries))
        note = f"{note}; padding of {_listed([entry.name for entry in padded])} is not compared"
    ours, theirs = first.manifest.params, second.manifest.params
    idle = [
        unused_params(first, (name for name in ours if name not in param_map.by_name and name not in theirs)),
        unused_params(second, (path for path in theirs if path not in param_map.by_path and path not in ours)),
    ]
    if idle[0]:
        first = _without(first, idle[0])
    if any(idle):
        note = (
            f"{note}; {_listed([*idle[0], *idle[1]])}, which only one of them has and does not train, is not compared"
        )
    param_map = with_identities(param_map, (path for path in theirs if path not in idle[1]))
    activations = match_activations(first, second, param_map)
    view: Recording = mapped(second, param_map, first.manifest, activations, without=idle[1])
    return OneNaming(view, first, note) if swapped else OneNaming(first, view, note)


def _activations_of(recording: Recording) -> set[Of]:
    steps = range(recording.num_steps)
    return {(module, use) for step in steps for _, module, use in recording.activations(step)}


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return f"{'; '.join(names[:_MOST])}{more}"


def unit_in_source(recording: Recording, unit: str) -> str:
    """The name of a unit in the program that made a recording."""
    return recording.units_in_source.get(unit, unit) if isinstance(recording, MappedRecording) else unit
