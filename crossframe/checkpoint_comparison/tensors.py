"""Compares two tensors of one name: equal, rounded, cast, moved, partly missing, or of another run."""

from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from crossframe.dtypes import FLOATING, coarser, numpy_dtype, unit_roundoff
from crossframe.verdict.measure.bounds_by_dtype import bounds_for
from crossframe.verdict.verdicts import Verdict


class Kind(Enum):
    """How two tensors differ."""

    STEP = "step"
    UPDATE = "update"
    NOT_FINITE = "not finite"
    TRANSPOSED = "transposed"
    PERMUTED = "permuted"
    ZEROS = "zeros"
    TRUNCATED = "truncated"
    MISSING = "missing"
    SHAPE = "shape"
    UNRELATED = "unrelated"
    BEYOND = "beyond"
    VALUE = "value"
    CAST = "cast"
    ROUNDING = "rounding"


VERDICTS = {
    Kind.STEP: Verdict.INCOMPARABLE,
    Kind.UPDATE: Verdict.BUG,
    Kind.NOT_FINITE: Verdict.BUG,
    Kind.TRANSPOSED: Verdict.BUG,
    Kind.PERMUTED: Verdict.BUG,
    Kind.ZEROS: Verdict.BUG,
    Kind.TRUNCATED: Verdict.BUG,
    Kind.MISSING: Verdict.INCOMPARABLE,
    Kind.SHAPE: Verdict.INCOMPARABLE,
    Kind.UNRELATED: Verdict.INCOMPARABLE,
    Kind.BEYOND: Verdict.INCONCLUSIVE,
    Kind.VALUE: Verdict.EQUAL,
    Kind.CAST: Verdict.ROUNDING,
    Kind.ROUNDING: Verdict.ROUNDING,
}
# Independent values have a correlation of about 1 / sqrt(numel); the same parameters later in training a much larger one.
_RELATED = 0.5


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that two stored models do not share bit for bit.

    Attributes:
        name: of the tensor; "" for a difference of the whole model.
        kind: how it differs.
        text: how, as a sentence.
        verdict: what it means by itself.
        difference: norm(a - b) / norm(a); None if the tensors cannot be subtracted.
    """

    name: str
    kind: Kind
    text: str
    verdict: Verdict
    difference: float | None = None

    def to_json(self) -> dict:
        """The difference as a JSON object."""
        finite = self.difference is not None and np.isfinite(self.difference)
        return {
            "name": self.name,
            "kind": self.kind.value,
            "verdict": self.verdict.value,
            "difference": self.difference if finite else None,
            "description": self.text,
        }


def difference_of(name: str, a: np.ndarray, b: np.ndarray, labels: tuple[str, str]) -> TensorDifference | None:
    """How two tensors differ; None if they are equal in dtype, shape and every bit.

    Args:
        labels: names of the two models.
    """
    if a.shape != b.shape:
        return _of_shapes(name, a, b, labels)
    if a.dtype == b.dtype and _same_bits(a, b):
        return None
    if not {a.dtype.name, b.dtype.name} <= set(FLOATING):
        num = int(np.count_nonzero(a != b))
        text = f"{name!r} ({_dtypes(a, b)}) differs in {num} of {a.size} elements"
        return _made(name, Kind.BEYOND if num else Kind.CAST, text)
    if a.dtype != b.dtype:
        return _of_dtypes(name, a, b, labels)
    return _of_values(name, a, b, labels)


def _made(
    name: str, kind: Kind, text: str, difference: float | None = None, verdict: Verdict | None = None
) -> TensorDifference:
    return TensorDifference(name, kind, text, verdict or VERDICTS[kind], difference)


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def _dtypes(a: np.ndarray, b: np.ndarray) -> str:
    return a.dtype.name if a.dtype == b.dtype else f"{a.dtype.name} and {b.dtype.name}"


def _of_shapes(name: str, a: np.ndarray, b: np.ndarray, labels: tuple[str, str]) -> TensorDifference:
    shapes = f"{list(a.shape)} in {labels[0]}, {list(b.shape)} in {labels[1]}"
    text = f"{name!r} has another shape: {shapes}"
    # In another shape the values can be the same; a program that expects one of the shapes refuses the other.
    if a.ndim == b.ndim == 2 and a.shape == b.shape[::-1] and np.array_equal(a, b.T, equal_nan=True):
        return _made(name, Kind.TRANSPOSED, f"{text}; it is transposed", verdict=Verdict.INCOMPARABLE)
    if a.size == b.size and np.array_equal(a.reshape(-1), b.reshape(-1), equal_nan=True):
        return _made(name, Kind.SHAPE, f"{text}; the elements are equal in order")
    return _made(name, Kind.SHAPE, text)


def _of_dtypes(name: str, a: np.ndarray, b: np.ndarray, labels: tuple[str, str]) -> TensorDifference:
    coarse = coarser(a.dtype.name, b.dtype.name)
    dtype = numpy_dtype(coarse)
    pair = f"{a.dtype.name} in {labels[0]}, {b.dtype.name} in {labels[1]}"
    if (lost := _not_finite_on_one_side(name, a, b, labels)) is not None:  # such as by a cast that overflowed
        return replace(lost, text=f"{pair}: {lost.text}")
    with np.errstate(over="ignore"):
        x, y = a.astype(dtype), b.astype(dtype)
    if np.array_equal(x, y, equal_nan=True):
        return _made(name, Kind.CAST, f"{name!r} is {pair}; after a cast to {coarse} every element is equal")
    fine, short = (a, b) if b.dtype == dtype else (b, a)
    if fine.dtype == np.float32 and coarse == "bfloat16":
        cut = (np.ascontiguousarray(fine).view(np.uint32) >> 16).astype(np.uint16)
        if np.array_equal(cut, np.ascontiguousarray(short).view(np.uint16)):
            text = f"{name!r} is {pair}; the cast dropped the last 16 bits instead of rounding to nearest"
            return _made(name, Kind.TRUNCATED, text)
    found = _of_values(name, x, y, labels)
    return TensorDifference(name, found.kind, f"{pair}: {found.text}", found.verdict, found.difference)


def _not_finite_on_one_side(
    name: str, a: np.ndarray, b: np.ndarray, labels: tuple[str, str]
) -> TensorDifference | None:
    """The difference of two tensors of which one has more elements that are not finite; None if both have as many."""
    bad = _num_not_finite(a), _num_not_finite(b)
    if bad[0] == bad[1]:
        return None
    text = f"{name!r} has {bad[0]} elements that are not finite in {labels[0]}, {bad[1]} in {labels[1]}"
    return _made(name, Kind.NOT_FINITE, text)


def _num_not_finite(array: np.ndarray) -> int:
    return int(np.count_nonzero(~np.isfinite(array)))


def _of_values(name: str, a: np.ndarray, b: np.ndarray, labels: tuple[str, str]) -> TensorDifference:
    """A difference of two tensors of one shape and floating dtype."""
    if (lost := _not_finite_on_one_side(name, a, b, labels)) is not None:
        return lost
    same_not_finite = np.array_equal(
        *(np.where(np.isfinite(each), np.zeros_like(each), each) for each in (a, b)), equal_nan=True
    )
    finite = np.isfinite(a) & np.isfinite(b)
    x, y = (np.where(finite, each, 0).astype(np.float64) for each in (a, b))
    size, away = float(np.linalg.norm(x)), np.abs(x - y)
    difference = float(np.linalg.norm(away)) / size if size else float("inf")
    u, bounds = unit_roundoff(a.dtype.name), bounds_for(a.dtype.name)
    # Neighbours in a dtype lie at most 2u apart, relative to the larger.
    units = float(np.max(away / np.maximum(2 * u * np.maximum(np.abs(x), np.abs(y)), np.finfo(np.float64).tiny)))
    about = f"by {difference:.1e} of its norm, at most {units:.3g} units in the last place of {a.dtype.name}"
    if same_not_finite and units <= 1:
        return _made(name, Kind.ROUNDING, f"{name!r} differs {about}, which is one rounding", difference)
    if same_not_finite and bounds.decisive and difference <= bounds.parameter:
        text = f"{name!r} differs {about}, within {bounds.parameter:.1e}, the bound of rounding in a training run"
        return _made(name, Kind.ROUNDING, text, difference)
    if a.ndim == 2 and a.shape[0] == a.shape[1] and np.array_equal(a, b.T, equal_nan=True):
        return _made(name, Kind.TRANSPOSED, f"{name!r} is transposed", difference)
    if np.array_equal(np.sort(a, None), np.sort(b, None), equal_nan=True):
        return _made(name, Kind.PERMUTED, f"{name!r} has the same elements in another order", difference)
    if not same_not_finite:
        text = f"{name!r} has elements that are not finite, {_num_not_finite(a)} in both, in other places or with other values"
        return _made(name, Kind.NOT_FINITE, text)
    for label, zero, other in ((labels[0], x, y), (labels[1], y, x)):
        differs = zero != other
        if not np.any(zero[differs]):
            where = np.flatnonzero(differs)
            text = (
                f"{name!r} is zero in {label} in {where.size} of {a.size} elements (from {where[0]} to {where[-1]}), and equal "
                "elsewhere: a part was not saved or not loaded"
            )
            return _made(name, Kind.ZEROS, text, difference)
    if a.size > 1 and _correlation(x, y) < _RELATED:
        return _made(name, Kind.UNRELATED, f"{name!r} has values that are unrelated", difference)
    return _made(name, Kind.BEYOND, f"{name!r} differs {about}, more than rounding", difference)


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    x, y = x.reshape(-1), y.reshape(-1)
    size = float(np.linalg.norm(x) * np.linalg.norm(y))
    return float(x @ y) / size if size else 0.0
