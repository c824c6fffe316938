"""The initial values of a golden's parameters, as far as another model has these values: a golden has only sketches.

The fingerprint of a sketch tells whether an array has the same elements in the same order. So a parameter of a golden has the
values of an array of the other model, of some of its rows, or of several arrays joined, if these have its fingerprint. Only rows
and arrays whose sums of squares fit are tried.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from crossframe.alignment.module_names import kind_of
from crossframe.alignment.portions import Rows
from crossframe.alignment.solve import rearrangements
from crossframe.alignment.summary import Summary
from crossframe.dtypes import numpy_dtype
from crossframe.recording import Recording
from crossframe.recording.event_format import PARAMETERS
from crossframe.recording.sample import Sample, sample_of
from crossframe.recording.sketch import Sketch, sketches_of

_MOST_ORDERED = 4
"""Up to this many arrays are joined in every order; more of them in the order of the model."""
_NEAR = 1e-5
"""Sums of squares in float32 of equal elements differ by less."""


def golden_values(golden: Recording, others: Mapping[str, np.ndarray | Summary]) -> dict[str, np.ndarray | Summary]:
    """The values of a golden's parameters, by name. Those that the other model lacks are random, so that they equal no others.

    Args:
        others: the values of the other model, by name. If there are summaries, the result has these, and no portions of arrays.
    """
    wanted = {
        name: (spec.shape, golden.sketch(PARAMETERS, 0, name))
        for name, spec in golden.manifest.params.items()
        if golden.has(PARAMETERS, 0, name)
    }
    if any(isinstance(each, Summary) for each in others.values()):
        return {name: _summary(*each, others) for name, each in wanted.items()}
    arrays = {name: array for name, array in others.items() if isinstance(array, np.ndarray)}
    whole = {_key(sketches_of([array])[0]): name for name, array in arrays.items()}
    found: dict[str, np.ndarray | Summary] = {}
    for name, (shape, sketch) in wanted.items():
        other = whole.get(_key(sketch))
        values = _constant(sketch) if other is None else arrays[other]
        if values is not None:
            found[name] = values.reshape(shape)
    equal = {_key(sketch) for _, sketch in wanted.values()}
    left = {name: arrays[name] for key, name in whole.items() if key not in equal}
    for name, (shape, sketch) in wanted.items():
        if name not in found:
            values = next((each for each in _candidates(shape, sketch, left) if _has(sketch, each)), None)
            found[name] = _no_values(shape, sketch) if values is None else values
    return {name: found[name] for name in wanted}


def _key(sketch: Sketch) -> tuple[str, int, int]:
    """What equal arrays have in common."""
    return sketch.dtype, sketch.numel, sketch.fingerprint


def _summary(shape: tuple[int, ...], sketch: Sketch, others: Mapping[str, np.ndarray | Summary]) -> Summary:
    """The summary of a parameter, with the sample of an equal one."""
    for each in others.values():
        other = Summary.of(each)
        if other.sketch.equals(sketch):
            return Summary(shape, sketch, other.sample)
    values = _constant(sketch)
    if values is not None:
        return Summary(shape, sketch, sample_of(values))
    unknown = Sample(sketch.fingerprint, np.empty(0, np.int64), np.empty(0, np.float32), 0.0, math.nan)
    return Summary(shape, sketch, unknown)


def _has(sketch: Sketch, array: np.ndarray) -> bool:
    return sketches_of([array])[0].equals(sketch)


def _constant(sketch: Sketch) -> np.ndarray | None:
    """The elements of a parameter that all have one value; None if they have several."""
    if not sketch.numel or sketch.num_not_finite:
        return None
    dtype = numpy_dtype(sketch.dtype)
    size = np.array(sketch.norm / math.sqrt(sketch.numel)).astype(dtype)
    # The norm has the digits of float32.
    near = [size, *(np.nextafter(size.astype(np.float32), np.float32(to)).astype(dtype) for to in (0, np.inf))]
    for value in (each for one in near for each in (one, -one)):
        array = np.full(sketch.numel, value, dtype)
        if _has(sketch, array):
            return array
    return None


def _no_values(shape: tuple[int, ...], sketch: Sketch) -> np.ndarray:
    """Values that no parameter has."""
    return np.random.default_rng(sketch.fingerprint).normal(size=shape).astype(numpy_dtype(sketch.dtype))


def _candidates(shape: tuple[int, ...], sketch: Sketch, arrays: Mapping[str, np.ndarray]) -> Iterator[np.ndarray]:
    """Arrays of a shape, with the parameter's sum of squares."""
    alike = {name: array for name, array in arrays.items() if array.dtype == numpy_dtype(sketch.dtype)}
    for array in alike.values():
        if array.size == sketch.numel and _is_near(_squares(array).sum(), sketch):
            yield from _in_shape(array, shape)
        elif array.size > sketch.numel:
            for rows in _portions(array, sketch):
                yield from _in_shape(rows.of(array), shape)
    for parts in _windows(alike, sketch):
        for joined in _joined(parts):
            yield from _in_shape(joined, shape)


def _is_near(squares: float, sketch: Sketch) -> bool:
    return abs(squares - sketch.squares) <= _NEAR * sketch.squares


def _squares(array: np.ndarray, dim: int | None = None) -> np.ndarray:
    """The sum of squares of all elements, or of each row along a dim."""
    wide = np.square(array.astype(np.float64))
    return wide.sum(axis=None if dim is None else tuple(axis for axis in range(array.ndim) if axis != dim))


def _in_shape(array: np.ndarray, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """The array in every order of its dims that gives a shape."""
    return (np.ascontiguousarray(form(array)) for form in rearrangements(shape, array.shape))


def _portions(array: np.ndarray, sketch: Sketch) -> Iterator[Rows]:
    """The rows of an array with as many elements as a parameter, and its sum of squares."""
    for dim, size in enumerate(array.shape):
        count, rest = divmod(sketch.numel * size, array.size)
        if rest or not count:
            continue
        squares = _squares(array, dim)
        for blocks in _divisors(math.gcd(count, size)):
            own, period = count // blocks, size // blocks
            for start in range(0, period - own + 1, math.gcd(own, period)):
                if _is_near(squares.reshape(blocks, period)[:, start : start + own].sum(), sketch):
                    yield Rows(dim, blocks, start, own, period)


def _windows(arrays: Mapping[str, np.ndarray], sketch: Sketch) -> Iterator[Sequence[np.ndarray]]:
    """Several arrays that follow each other, of one kind or of several layers, with a parameter's sum of squares together."""
    squares = {name: float(_squares(array).sum()) for name, array in arrays.items()}
    groups: dict[str, list[str]] = {}
    for name in arrays:
        for kind in dict.fromkeys((name.rpartition(".")[2], kind_of(name))):
            groups.setdefault(kind, []).append(name)
    for names in groups.values():
        for first in range(len(names)):
            numel, total = 0, 0.0
            for stop in range(first, len(names)):
                numel, total = numel + arrays[names[stop]].size, total + squares[names[stop]]
                if numel >= sketch.numel:
                    if stop > first and _is_near(total, sketch):
                        yield [arrays[name] for name in names[first : stop + 1]]
                    break


def _joined(parts: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Arrays stacked, or joined along a dim, as they are or in blocks."""
    orders = itertools.permutations(parts) if len(parts) <= _MOST_ORDERED else [tuple(parts)]
    for order in orders:
        shapes = [part.shape for part in order]
        if len(set(shapes)) == 1:
            yield np.stack(order)  # along another dim, it is this in another order of its dims
        for dim in range(min(map(len, shapes))):
            if len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) > 1:
                continue
            for blocks in _divisors(math.gcd(*(shape[dim] for shape in shapes))):
                apart = [
                    part.reshape(*part.shape[:dim], blocks, part.shape[dim] // blocks, *part.shape[dim + 1 :])
                    for part in order
                ]
                joined = np.concatenate(apart, dim + 1)
                yield joined.reshape(*joined.shape[:dim], -1, *joined.shape[dim + 2 :])


def _divisors(size: int) -> list[int]:
    return [each for each in range(1, size + 1) if size % each == 0]
