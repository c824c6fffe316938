"""Matches the inputs and outputs of modules of two recordings whose modules have different names.

Modules that enclose the same parameters are one module, whatever their values: a fault does not hide them. Modules without
parameters are matched by the values of their inputs and outputs, in the order of computation; those after a fault, whose values
differ, by equal names, by what was matched in other layers, or by their place between modules that are matched. Modules that
enclose different parameters are matched only if both their inputs and their outputs agree. Single inputs and outputs whose values
agree are matched last, for instance that of a projection with the inputs of the three that it joins. Dims may be transposed,
joined or split, and features permuted as the weights are. Their order is that under which the values agree; without one, that of
the weights, or of other activations of the same shapes.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from crossframe.alignment.elementwise import activation_between
from crossframe.alignment.module_names import is_in, kind_of, module_of
from crossframe.alignment.portions import features_text
from crossframe.alignment.solve import rearrangements
from crossframe.dtypes import coarser, unit_roundoff
from crossframe.param_map import ParamMap
from crossframe.rearrange import Rearrangement
from crossframe.recording import Recording, common_steps
from crossframe.recording.event_format import INPUT, OUTPUT
from crossframe.recording.mapped_recording import Activations, Of
from crossframe.recording.module_calls import called_module, renamed_call
from crossframe.recording.sketch import Sketch, sketches_of

T = TypeVar("T")
_ROUNDINGS, NEAR = 8, 1e-4
"""Activations are near if their relative distance is at most this many roundings, or `NEAR`: more than the rounding of a part in
float32, and far below the distance of the inputs of two layers. Nothing is judged by it."""
_FAR = 0.5
"""Values of two things differ by about their norms, which is more than this relative distance."""
_LEAST_VALUES = 4
"""Activations with fewer distinct values, such as zeros and masks, are not matched by them."""
_SAMPLED = 1 << 12
"""The number of elements of which distinct values are counted."""
_MOST_FORMS = 64
"""The number of rearrangements between two shapes that are tried."""


def match_activations(first: Recording, second: Recording, param_map: ParamMap) -> Activations:
    """The activations of the second recording that are those of the first one, at the first step at which both have them.

    Args:
        param_map: names of the first recording, and as paths those of the second one.
    """
    step = next(
        (step for step in common_steps(first, second) if first.activations(step) and second.activations(step)), None
    )
    if step is None:
        return {}
    near = max(NEAR, _ROUNDINGS * unit_roundoff(coarser(first.manifest.dtype, second.manifest.dtype)))
    return _Matcher(_Side(first, step), _Side(second, step), param_map, near).match()


@dataclass(frozen=True)
class _Summary:
    """What does not depend on the order of the elements of an activation.

    Attributes:
        tells: whether its values are different enough to tell it from others.
    """

    norm: float
    tells: bool

    @classmethod
    def of(cls, array: np.ndarray) -> "_Summary":
        some = array.reshape(-1)[:: max(1, array.size // _SAMPLED)]
        tells = len(np.unique(some)) >= _LEAST_VALUES
        return cls(float(np.linalg.norm(array)), tells)


class _Side:
    """The activations of one recording at a step: of rank 0, in the first microbatch."""

    def __init__(self, recording: Recording, step: int) -> None:
        self._recording, self._step = recording, step
        self.order: list[Of] = [(module, use) for at, module, use in recording.activations(step) if at == 0]
        called = list(dict.fromkeys(module for module, _ in self.order))
        self.modules = [name for name in called if called_module(name) == name]
        self.further_calls = [name for name in called if called_module(name) != name]
        self.summary = functools.cache(self._summary)

    def shape(self, of: Of) -> tuple[int, ...]:
        return self._recording.activation_shape(self._step, 0, 0, *of)

    @property
    def loss(self) -> float:
        """The mean over ranks at the step; NaN if there is none."""
        return float(np.mean(self._recording.losses()[self._step]))

    def param_shape(self, name: str) -> tuple[int, ...]:
        return self._recording.manifest.params[name].shape

    def array(self, of: Of) -> np.ndarray | None:
        """The values of an activation in float64; None if they are a sketch or not finite."""
        if self.sketch(of) is not None:
            return None
        array = self._recording.activation(self._step, 0, 0, *of).astype(np.float64)
        return array if np.isfinite(array).all() else None

    def sketch(self, of: Of) -> Sketch | None:
        """The sketch of an activation; None if it has elements."""
        return self._recording.activation_sketch(self._step, 0, 0, *of)

    def _summary(self, of: Of) -> _Summary | None:
        """The summary of an activation; None if it has no values."""
        array = self.array(of)
        return None if array is None else _Summary.of(array)


class _Matcher:
    def __init__(self, first: _Side, second: _Side, param_map: ParamMap, near: float) -> None:
        self._first, self._second, self._map, self._near = first, second, param_map, near
        self._pairs: dict[str, str] = {}
        self._agreed = functools.cache(self._nearest)

    def match(self) -> Activations:
        self._by_parameters()
        self._by_values()
        self._by_names()
        self._by_other_layers()
        self._by_place()
        self._by_calls()
        return self._activations()

    # Modules

    def _open(self) -> tuple[list[str], list[str]]:
        taken = set(self._pairs.values())
        return (
            [module for module in self._first.modules if module not in self._pairs],
            [module for module in self._second.modules if module not in taken],
        )

    def _by_parameters(self) -> None:
        """Match the modules that enclose the same parameters. Nested ones are matched by values, or the outermost ones first."""
        ours: dict[frozenset[str], list[str]] = {}
        theirs: dict[frozenset[str], list[str]] = {}
        for module in self._first.modules:
            ours.setdefault(self._own_paths(module), []).append(module)
        for module in self._second.modules:
            theirs.setdefault(self._paths_of_other(module), []).append(module)
        for paths, modules in ours.items():
            others = theirs.get(paths, []) if paths else []
            found = self._in_order(modules, others)
            left = [module for module in modules if module not in found]
            free = [other for other in others if other not in found.values()]
            self._pairs |= found | dict(zip(left, free, strict=False))

    def _paths(self, module: str) -> frozenset[str]:
        """The paths of the parameters that a module of the first recording encloses."""
        return frozenset(path for entry in self._map.entries if is_in(entry.name, module) for path in entry.paths)

    def _paths_of_other(self, module: str) -> frozenset[str]:
        """The paths of the parameters that a module of the second recording encloses."""
        return frozenset(path for path in self._map.by_path if is_in(path, module))

    def _own_paths(self, module: str) -> frozenset[str]:
        """The paths of the parameters that a module encloses; none if one of them is also part of a parameter outside."""
        outside = (path for entry in self._map.entries if not is_in(entry.name, module) for path in entry.paths)
        paths = self._paths(module)
        return frozenset() if paths.intersection(outside) else paths

    def _by_values(self) -> None:
        """Match modules without parameters of their own, between the same matched modules, by their values."""
        self._pairs |= self._in_order(*self._open())

    def _in_order(self, modules: Sequence[str], others: Sequence[str]) -> dict[str, str]:
        """The matches of modules in the same order whose values agree most often."""
        return dict(_common_subsequence(modules, others, self._score))

    def _score(self, module: str, other: str) -> int:
        """3 if the inputs and outputs of two modules agree, 1 if one of them does and the other one may be faulty, else 0."""
        if not self._alike(module, other):
            return 0
        agree = sum(self._agree((module, use), (other, use)) for use in self._common_uses(module, other))
        return (0, int(self._enclose_same(module, other)), 3)[agree]

    def _enclose_same(self, module: str, other: str) -> bool:
        """Whether two modules enclose the same parameters, or portions of them."""
        return self._paths(module) == self._paths_of_other(other)

    def _common_uses(self, module: str, other: str) -> list[str]:
        """Which of the inputs and the outputs of two modules both recordings have."""
        return [
            use for use in (INPUT, OUTPUT) if (module, use) in self._first.order and (other, use) in self._second.order
        ]

    def _alike(self, module: str, other: str) -> bool:
        """Whether the inputs and outputs of two modules have equally many elements."""
        return all(
            np.prod(self._first.shape((module, use))) == np.prod(self._second.shape((other, use)))
            for use in self._common_uses(module, other)
        )

    def _agree(self, ours: Of, theirs: Of) -> bool:
        a, b = self._first.summary(ours), self._second.summary(theirs)
        if a is not None and b is not None:  # for most pairs the norms say that they do not agree, in any order
            most = self._near * a.norm
            if abs(a.norm - b.norm) > most:
                return False
        return self._agreed(ours, theirs) is not None

    def _by_names(self) -> None:
        """Match modules with equal names."""
        modules, others = self._open()
        self._pairs |= {name: name for name in modules if name in others and self._alike(name, name)}

    def _by_other_layers(self) -> None:
        """Match modules as in other layers: by the same names below two matched modules."""
        below: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for (module, other), (outer, inner) in itertools.product(self._pairs.items(), repeat=2):
            if is_in(module, outer) and is_in(other, inner):
                below.setdefault((module[len(outer) :], kind_of(outer)), []).append(
                    (other[len(inner) :], kind_of(inner))
                )
        modules, others = self._open()
        for module in modules:
            for outer, inner in list(self._pairs.items()):  # it grows
                if is_in(module, outer):
                    for rest, kind in below.get((module[len(outer) :], kind_of(outer)), ()):
                        other = inner + rest
                        if kind == kind_of(inner) and other in others and self._alike(module, other):
                            self._pairs.setdefault(module, other)

    def _by_place(self) -> None:
        """Match modules that are alone between two matched modules in both recordings, or equally many."""
        ours = _gaps(self._first.modules, {module: module for module in self._pairs})
        theirs = _gaps(self._second.modules, {other: module for module, other in self._pairs.items()})
        for place, inside in ours.items():
            there = theirs.get(place, [])
            if any(place) and len(inside) == len(there) and all(map(self._could_be_one, inside, there)):
                self._pairs |= zip(inside, there, strict=True)

    def _by_calls(self) -> None:
        """Match the further calls of modules that are matched."""
        calls = ((call, called_module(call)) for call in self._first.further_calls)
        others = {
            call: renamed_call(call, lambda module: self._pairs[module]) for call, of in calls if of in self._pairs
        }
        self._pairs |= {
            call: other
            for call, other in others.items()
            if other in self._second.further_calls and self._alike(call, other)
        }

    def _could_be_one(self, module: str, other: str) -> bool:
        return self._alike(module, other) and self._enclose_same(module, other)

    # Activations

    def _activations(self) -> Activations:
        pairs = [
            ((module, use), (other, use))
            for module, other in self._pairs.items()
            for use in self._common_uses(module, other)
        ]
        forms = {
            pair: self._agreed(*pair)
            for pair in pairs
            if self._agreed(*pair) is not None or not self._is_across_activation(*pair)
        }
        others = self._others({ours for ours, _ in forms}, {theirs for _, theirs in forms})
        forms |= {pair: self._agreed(*pair) for pair in others}
        known: dict[tuple[object, ...], list[Rearrangement]] = {}
        for (ours, theirs), form in forms.items():
            if form is not None:
                shapes = self._first.shape(ours), self._second.shape(theirs)
                for key in (shapes, (*shapes, kind_of(called_module(ours[0])), ours[1])):
                    known.setdefault(key, []).append(form)
        found = {}
        for (ours, theirs), form in forms.items():
            if form is None:
                form = self._likeliest(ours, theirs, known)
                if form is None or self._is_without_effect(ours, theirs, form, forms):
                    continue
            found[ours] = (theirs, None if form.is_identity else form)
        return found

    def _others(self, ours: Collection[Of], theirs: Collection[Of]) -> list[tuple[Of, Of]]:
        """Further activations that agree, in the same order, of modules that are not matched."""
        found = []
        for use in (INPUT, OUTPUT):
            one, other = (
                [of for of in side.order if of[1] == use and of not in matched]
                for side, matched in ((self._first, ours), (self._second, theirs))
            )
            found += _common_subsequence(one, other, lambda x, y: int(self._agree(x, y)))
        return found

    def _nearest(self, ours: Of, theirs: Of, near: float | None = None) -> Rearrangement | None:
        """The rearrangement under which the values agree; None if there is none.

        Args:
            near: the largest relative distance; None: `near` of the matcher.
        """
        near, summary = self._near if near is None else near, self._first.summary(ours)
        if summary is not None and not summary.tells:
            return None
        shapes = self._first.shape(ours), self._second.shape(theirs)
        forms = itertools.chain(_forms(*shapes), self._forms_of_weights(ours, theirs))
        return next((form for form, apart in self._apart(ours, theirs, forms) if apart <= near), None)

    def _forms_of_weights(self, ours: Of, theirs: Of) -> list[Rearrangement]:
        """The rearrangements of features that the weights of two modules have: those with other orders of heads have other orders
        of features too."""
        shape, other = self._first.shape(ours), self._second.shape(theirs)
        found: dict[str, Rearrangement] = {}
        called = called_module(ours[0]), called_module(theirs[0])
        for entry in self._map.entries:
            modules = module_of(entry.name), *map(module_of, entry.paths)
            if modules != called or entry.pattern is None or entry.selects or entry.pads:
                continue
            weight = self._second.param_shape(entry.paths[0])
            for dim, size in enumerate(entry.canonical_shape(weight)):
                text = features_text(entry.pattern, weight, dim=dim, num_dims=len(shape)) if size == shape[-1] else None
                if text is not None and (form := Rearrangement(text)).fits(other) and form.shape(other) == shape:
                    found[text] = form
        return list(found.values())

    def _is_across_activation(self, ours: Of, theirs: Of) -> bool:
        """Whether one of two activations is the other one after an elementwise activation: then they are two things, as of a norm
        and of a norm with an activation of its own."""
        a, b = self._first.array(ours), self._second.array(theirs)
        if a is None or b is None:
            return False
        return any(
            activation_between(x, y, self._near) is not None
            for form in _forms(a.shape, b.shape)
            for x, y in itertools.permutations((a, form(b)))
        )

    def _is_without_effect(self, ours: Of, theirs: Of, form: Rearrangement, pairs: Iterable[tuple[Of, Of]]) -> bool:
        """Whether values are as different as those of two things, but the output of a module around them and the loss agree: then
        they are two things, such as what two implementations compute before and after a residual."""
        losses = self._first.loss, self._second.loss
        if not abs(losses[0] - losses[1]) <= NEAR * abs(losses[0]):
            return False
        if not any(apart >= _FAR for _, apart in self._apart(ours, theirs, [form])):
            return False
        return any(
            x[1] == OUTPUT and is_in(ours[0], x[0]) and is_in(theirs[0], y[0]) and self._nearest(x, y, NEAR) is not None
            for x, y in pairs
        )

    def _apart(self, ours: Of, theirs: Of, forms: Iterable[Rearrangement]) -> Iterator[tuple[Rearrangement, float]]:
        """norm(a - form(b)) / norm(a) of two activations for each rearrangement for which it is known, an estimate if they are
        sketches."""
        a, b = self._first.array(ours), self._second.array(theirs)
        x, y = self._first.sketch(ours), self._second.sketch(theirs)
        for form in forms:
            if a is not None and b is not None:
                norm, apart = float(np.linalg.norm(a)), float(np.linalg.norm(a - form(b)))
            else:
                # Next to a golden the other recording may be in full.
                other = sketches_of([form(b)])[0] if b is not None else y if form.is_identity else None
                # Up to format 6 sketches of modules with different names have different keys.
                if x is None or other is None or x.seed != other.seed or x.num_not_finite or other.num_not_finite:
                    continue
                norm, apart = x.norm, x.distance(other)
            if norm > 0:
                yield form, apart / norm

    def _likeliest(
        self, ours: Of, theirs: Of, known: Mapping[tuple[object, ...], list[Rearrangement]]
    ) -> Rearrangement | None:
        """The rearrangement of values that differ: that of the same activation of other layers, or of the weights, or of most
        activations of the same shapes, or the first one of these shapes.

        Args:
            known: rearrangements under which other activations agree, by shapes, and by shapes, kind of module and use.
        """
        shapes = self._first.shape(ours), self._second.shape(theirs)
        of_kind = known.get((*shapes, kind_of(called_module(ours[0])), ours[1]))
        of_weights = self._forms_of_weights(ours, theirs) if ours[1] == OUTPUT else []
        forms = of_kind or of_weights[:1] or known.get(shapes) or _forms(*shapes)
        return max(forms, key=forms.count, default=None)


def _common_subsequence(ours: Sequence[T], theirs: Sequence[T], score: Callable[[T, T], int]) -> list[tuple[T, T]]:
    """The pairs, in order on both sides, with the largest sum of scores; earlier ones of equal sums."""
    scores = [[score(x, y) for y in theirs] for x in ours]
    best = [[0] * (len(theirs) + 1) for _ in range(len(ours) + 1)]
    for i, j in itertools.product(reversed(range(len(ours))), reversed(range(len(theirs)))):
        best[i][j] = max(best[i + 1][j], best[i][j + 1], scores[i][j] + best[i + 1][j + 1])
    found, i, j = [], 0, 0
    while i < len(ours) and j < len(theirs):
        if scores[i][j] and best[i][j] == scores[i][j] + best[i + 1][j + 1]:
            found.append((ours[i], theirs[j]))
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1
    return found


def _forms(first: tuple[int, ...], second: tuple[int, ...]) -> list[Rearrangement]:
    """Rearrangements between two shapes; that which changes nothing first."""
    return list(itertools.islice(rearrangements(first, second), _MOST_FORMS))


def _gaps(modules: Sequence[str], matched: Mapping[str, str]) -> dict[tuple[str, str], list[str]]:
    """Unmatched modules by the matched ones before and after them, under the names of the first recording."""
    found: dict[tuple[str, str], list[str]] = {}
    for i, module in enumerate(modules):
        if module not in matched:
            before = next((matched[each] for each in reversed(modules[:i]) if each in matched), "")
            after = next((matched[each] for each in modules[i:] if each in matched), "")
            found.setdefault((before, after), []).append(module)
    return found
