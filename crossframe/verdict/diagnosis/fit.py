"""Criteria for accepting a hypothesis about a difference.

A hypothesis predicts one side of a quantity from recorded values. Its *residual* is norm(side - prediction). It is accepted if
the residual is

- at most the bound due to rounding: the *limit* of the quantity (the bound on norm(a - b) between two correct sides), or the
  *error* of the prediction, which each hypothesis derives from the operations that it repeats; and
- at most half of the difference, so that a difference barely beyond its limit is not explained by an arbitrary hypothesis.

A hypothesis whose residual is within its own error is exact: it has no fitted constant and repeats the arithmetic. Among exact
hypotheses the most specific one is reported, otherwise the one with the smallest residual.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from crossframe.dtypes import FLOATING, numpy_dtype, unit_roundoff
from crossframe.verdict.measure.metrics import distance, norm

SIGNATURES = (
    "lost_step",
    "stale_copy",
    "lost_microbatch",
    "uneven_weights",
    "mixed_parameters",
    "transposed",
    "padding_shift",
    "missing_rank",
    "tied_weight",
    "low_precision_reduction",
    "low_precision",
    "shifted_positions",
    "attention_scale",
    "causal_mask",
    "padding_counted",
    "norm_epsilon",
    "tanh_gelu",
    "dropout",
    "bias_correction",
    "weight_decay",
    "optimizer_epsilon",
    "constant_factor",
    "other_batches",
)
"""Every signature, the more specific first."""
Key = TypeVar("Key", str, int)
TINY = np.finfo(np.float64).tiny
PLAIN = "factor"
"""The claim that the whole quantity is a multiple of the other side."""


@dataclass(frozen=True)
class Contrast:
    """The sides of a quantity that are assumed to be right and wrong, in float64.

    Attributes:
        right, wrong: arrays of the same shape.
        limit: the bound on norm(right - wrong) due to rounding; 0 for data that is only moved.
        roundoff: unit roundoff of the finer of the two dtypes.
    """

    right: np.ndarray
    wrong: np.ndarray
    limit: float
    roundoff: float = 0.0

    @classmethod
    def of(cls, right: np.ndarray, wrong: np.ndarray, limit: float) -> "Contrast":
        """From arrays of any floating dtype.

        >>> Contrast.of(np.ones(2, np.float32), np.zeros(2, np.float32), 0.0).roundoff == 2.0**-24
        True
        """
        wide = [np.asarray(side, np.float64) for side in (right, wrong)]
        return cls(wide[0], wide[1], float(limit), min(roundoff_of(right), roundoff_of(wrong)))

    @property
    def difference(self) -> float:
        """norm(right - wrong)."""
        return distance(self.right, self.wrong)

    def within(self, start: int, stop: int) -> "Contrast":
        """Elements `start:stop` of both sides, flattened."""
        right, wrong = (side.reshape(-1)[start:stop] for side in (self.right, self.wrong))
        return Contrast(right, wrong, self.limit, self.roundoff)

    def residual(self, predicted: np.ndarray) -> float:
        """norm(wrong - predicted)."""
        return distance(self.wrong, predicted)


def accepted(residual: float, difference: float, tolerance: float) -> bool:
    """Whether the residual of a hypothesis is small enough to accept it.

    >>> accepted(1e-9, 1.0, 1e-8), accepted(0.9, 1.0, 2.0), accepted(0.0, 0.0, 1.0)
    (True, False, False)
    """
    return residual <= tolerance and 2 * residual <= difference and difference > 0


def first_accepted(
    sides: Contrast, predictions: Iterable[tuple[Key, np.ndarray]], tolerance: float
) -> tuple[Key, float] | None:
    """(key, residual) of the first prediction of the wrong side that is accepted; those of other shapes are not."""
    difference = sides.difference
    for key, predicted in predictions:
        if predicted.shape == sides.wrong.shape:
            residual = sides.residual(predicted)
            if accepted(residual, difference, tolerance):
                return key, residual
    return None


def factor_between(x: np.ndarray, y: np.ndarray) -> float:
    """The least-squares c of y = c * x; 0 for zeros.

    >>> factor_between(np.array([1.0, 2.0]), np.array([3.0, 6.0]))
    3.0
    """
    x, y = x.reshape(-1), y.reshape(-1)
    size = norm(x)
    return float((x / size) @ y) / size if size and math.isfinite(size) else 0.0


def roundoff_of(array: np.ndarray) -> float:
    """The unit roundoff of an array's dtype; 0 for integers."""
    return unit_roundoff(array.dtype.name) if array.dtype.name in FLOATING else 0.0


def rounded_in(array: np.ndarray, dtype: str) -> np.ndarray:
    """Values that a kernel computes in float32 and rounds to a coarser dtype, in float64."""
    return array.astype(np.float32).astype(numpy_dtype(dtype)).astype(np.float64)


def sum_roundoff(terms: int, roundoff: float) -> float:
    """The bound on the relative rounding of a sum of products whose result is rounded to a dtype.

    Kernels add up values of coarser dtypes in float32, and round twice: a product and the result.

    >>> sum_roundoff(100, 2.0**-9) < 2.1 * 2.0**-9, sum_roundoff(100, 2.0**-53) == 102 * 2.0**-53
    (True, True)
    """
    return terms * min(roundoff, unit_roundoff("float32")) + 2 * roundoff


def factor_roundoff(values: np.ndarray) -> float:
    """The bound, in norm, on the rounding of values = c * x, where `factor_between` fits c in float64.

    It exceeds the rounding of the recorded values only if they are in float64 as well.
    """
    return sum_roundoff(values.size, unit_roundoff("float64")) * norm(values)


def is_uninformative(array: np.ndarray, limit: float = 0.0) -> bool:
    """Whether all elements are equal up to rounding, such as zeros or initial weights of a norm, so that equal values show
    nothing.

    >>> is_uninformative(np.ones(3)), is_uninformative(np.array([1e-9, 0.0]), 1e-8), is_uninformative(np.arange(3.0), 0.1)
    (True, True, False)
    """
    flat = array.astype(np.float64).reshape(-1)
    return norm(flat - flat[:1]) <= limit


@dataclass(frozen=True)
class Claim:
    """A claim that other parameters of the same step can confirm.

    Attributes:
        kind: what tells faults of one signature apart, if anything else than a constant does.
        value, error: a fitted constant and the bound on its error; None without a constant.
    """

    kind: str
    value: float | None = None
    error: float = 0.0

    def same(self, other: "Claim") -> bool:
        """Whether two claims agree.

        >>> Claim("factor", 2.0, 0.1).same(Claim("factor", 2.1, 0.1)), Claim("factor", 2.0).same(Claim("factor", 3.0))
        (True, False)
        """
        if self.kind != other.kind or self.value is None or other.value is None:
            return self.kind == other.kind and self.value == other.value
        return abs(self.value - other.value) <= self.error + other.error


@dataclass(frozen=True)
class Fit:
    """An accepted hypothesis.

    Attributes:
        signature: its name.
        evidence: a sentence with numbers, without a full stop.
        residual: norm of the unexplained part.
        error: the error of the prediction; 0 if a constant was fitted.
        claim: what other parameters of the step can confirm.
    """

    signature: str
    evidence: str
    residual: float
    error: float = 0.0
    claim: Claim = Claim("")

    def __post_init__(self) -> None:
        assert self.signature in SIGNATURES, self.signature


def best(fits: Iterable[Fit]) -> Fit | None:
    """The fit to report; None if there are none.

    >>> best([Fit("constant_factor", "", 1e-9, 1e-8), Fit("bias_correction", "", 2e-9, 1e-8)]).signature
    'bias_correction'
    >>> best([Fit("constant_factor", "", 1e-9), Fit("bias_correction", "", 2e-9)]).signature
    'constant_factor'
    """

    def order(fit: Fit) -> tuple[bool, float, int, bool]:
        exact = fit.residual <= fit.error
        # A factor of the whole quantity is less specific than a factor of a part.
        plain = fit.claim.kind == PLAIN
        return not exact, 0.0 if exact else fit.residual, SIGNATURES.index(fit.signature), plain

    return min(fits, key=order, default=None)
