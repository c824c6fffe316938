"""Aligns two models: the parameters that are equal but for their names, dims and grouping, found by their values.

Evidence comes in this order. An array whose slices are parameters of the other model holds these stacked, and so do the others
of its module (`stacks`). A parameter whose elements are those of one other is that one; the rearrangement is found (`solve`),
if need be with blocks in another order, such as gates, and checked on all elements. An array whose rows are the slices of
several others is these joined, and one whose first rows are another is this one padded (`joined`). Parameters with one value,
such as the zeros of biases, are told apart by their gradients, if there are any, and by the module that they belong to, as far
as its other parameters are aligned. Where a fault may have changed the gradients, the order in which modules are used tells
them apart too, then similar gradients, then equal names (`equal_values`).
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from crossframe.alignment.equal_values import (
    by_gradients_or_modules,
    by_names,
    by_order_of_use,
    by_similar_gradients,
    by_similar_gradients_of_layers,
    join_bias,
    last_of_values,
    split_bias,
)
from crossframe.alignment.joined import inside, join_and_pad
from crossframe.alignment.matching import SAMPLES, VALUES, Arrays, Matching
from crossframe.alignment.order_of_dims import pair, permute_blocks
from crossframe.alignment.sampled import members, parts_of
from crossframe.alignment.summary import Summary, varies
from crossframe.dtypes import coarser, numpy_dtype
from crossframe.errors import MappingError
from crossframe.param_map import MapEntry, ParamMap


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
        evidence: what decided each, by name: VALUES, SAMPLES, GRADIENTS or MODULES; where a fault may be, also the order of USE,
            SIMILAR gradients, or equal NAMES in corresponding modules.
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
    same: Set[str] = frozenset(),
) -> Alignment:
    """Find the parameters of the second model for each of the first one.

    Args:
        first: initial values by canonical name, as arrays or all as summaries (`alignment.models.summarized`).
        second: initial values by path, likewise.
        gradients: those of the first step, for parameters whose values are all equal; parameters may be missing.
        may_differ: whether a fault may have changed the gradients. Parameters that they do not tell apart are then those that are
            used after the same ones, whose gradients are the most similar, or that have equal names in corresponding modules.
        uses: the modules of both models in the order in which they are first used, as far as it is known.
        same: names of parameters that have the same name in both models, of which the order of dims alone is to be found.

    If the dtypes of parameters differ, all are compared in the coarsest one.

    Raises:
        MappingError: a model has no parameters.
    """
    if not first or not second:
        raise MappingError("expected parameters in both models")
    if not isinstance(next(iter(first.values())), Summary):
        dtype = numpy_dtype(coarser(*(array.dtype.name for side in (first, second) for array in side.values())))
        first, second = ({n: v.astype(dtype, copy=False) for n, v in side.items()} for side in (first, second))
    return _aligned(Matching(first, second, gradients or ({}, {}), may_differ=may_differ, uses=uses, same=same))


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


def _aligned(matching: Matching) -> Alignment:
    if not matching.summarized:
        matching.unstack()
    for several in (True, False):  # the weights of a module decide about the order of its biases
        for names, paths in matching.groups():
            if len(names) == len(paths) == 1 and varies(matching.first[names[0]]) == several:
                pair(matching, names[0], paths[0], VALUES)
        if several and not matching.summarized:
            permute_blocks(matching)
    if matching.summarized:
        _add_parts(matching)
    else:
        join_and_pad(matching)
    matching.open_varied = tuple(
        [each for each in names if varies(side[each])]
        for names, side in zip((matching.open_names(), matching.open_paths()), matching.sides(), strict=True)
    )
    decided = True
    while decided:  # each decision is evidence for others
        decided = False
        for names, paths in matching.groups():
            decided |= by_gradients_or_modules(matching, names, paths)
        for name in matching.open_names():
            decided |= join_bias(matching, name)
        for path in matching.open_paths():
            decided |= split_bias(matching, path)
        decided = decided or any(last_of_values(matching, *group) for group in matching.groups())
        if matching.may_differ:
            for resolve in (by_order_of_use, by_similar_gradients_of_layers, by_similar_gradients, by_names):
                decided = decided or any(resolve(matching, *group) for group in matching.groups())
    entries = tuple(matching.stated(matching.entries[name]) for name in matching.first if name in matching.entries)
    return Alignment(ParamMap(entries), matching.evidence, tuple(_undecided(matching)))


def _add_parts(matching: Matching) -> None:
    """Add the parameters whose elements are those of an array in which they are stacked or joined, as samples show."""
    for path in matching.open_paths():
        for name, pattern in (parts_of(matching.second[path], _open_varied(matching)) or {}).items():
            entry = MapEntry(name, path, pattern)
            assert matching.fits_shape(entry), entry
            matching.add(entry, SAMPLES)


def _inside(matching: Matching, path: str) -> tuple[str, ...]:
    """The parameters of the first model that an array consists of, which no pattern states."""
    if not matching.summarized:
        return inside(matching, path)
    return tuple(members(matching.second[path], _open_varied(matching)))


def _open_varied(matching: Matching) -> dict[str, Summary]:
    """The open parameters of the first model with several values."""
    return {name: matching.first[name] for name in matching.open_names() if varies(matching.first[name])}


def _undecided(matching: Matching) -> list[Undecided]:
    """What is open: groups with the same elements, then each parameter that has no counterpart."""
    words = _IN_FULL if matching.summarized else {why: why for why in _IN_FULL}
    found = []
    for names, paths in matching.groups():
        varied = len(names) == len(paths) == 1 and varies(matching.first[names[0]])
        found.append(Undecided(tuple(names), tuple(paths), words[_OTHER_ORDER] if varied else _SAME_VALUES))
    reported = {each for undecided in found for each in (*undecided.names, *undecided.paths)}
    for path in matching.open_paths():
        if path not in reported and (names := _inside(matching, path)):
            found.append(Undecided(names, (path,), words[_INSIDE]))
            reported |= {*names, path}
    aligned = {matching.signature(0, name): name for name in matching.entries}
    for name in matching.open_names():
        if name not in reported:
            tied = aligned.get(matching.signature(0, name))
            why = f"equal to {tied!r}; leave it out if the two are tied" if tied else words[_ALONE]
            found.append(Undecided((name,), (), why))
    return found + [Undecided((), (path,), words[_ALONE]) for path in matching.open_paths() if path not in reported]


_SAME_VALUES = (
    "equal values do not tell them, or their dims, apart; gradients of the first step decide, if both models are recordings "
    "that have them"
)
_OTHER_ORDER = "the same elements in another order, which no rearrangement of dims explains"
_INSIDE = "the path has these parameters as its rows in an order that no pattern states; split it"
_ALONE = "no counterpart has the same elements; were both models given the same initial values?"
_FULL = "recordings of the first step in full (--detail full) or checkpoints decide"
_IN_FULL = {
    _OTHER_ORDER: f"the same elements in an order that their samples do not decide; {_FULL}",
    _INSIDE: f"the path has the elements of these parameters, in an order that their samples do not decide; {_FULL}",
    _ALONE: f"no counterpart has the same elements, as far as sketches tell; if it is padded or of another dtype, {_FULL}",
}
"""What is open between recordings in sketches."""
