"""When a hypothesis about a difference is accepted.

A hypothesis predicts one side of a quantity from what was recorded. What it does not explain, norm(side - prediction), is its
*rest*. It is accepted where the rest is

- no more than rounding may leave: the *limit* of the quantity (what norm(a - b) reaches between two right sides), or the *error*
  of the prediction itself, which each hypothesis derives from the operations that it repeats; and
- at most half of the difference that it is to explain, so that a difference that is barely beyond its limit is not put down to
  whatever is near.

A hypothesis without a constant of its own that is accepted by its own error has repeated the very arithmetic: a more specific one
then goes before a more general one. Otherwise the smaller rest decides.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from crossframe.dtypes import FLOATING, unit_roundoff
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
PLAIN = "factor"
"""The claim of a quantity that is a multiple of the other as a whole."""


@dataclass(frozen=True)
class Contrast:
    """Both sides of one quantity, the one that is taken to be right and the one that is taken to be wrong, in float64.

    Attributes:
        right, wrong: of one shape.
        limit: the largest norm(right - wrong) that rounding may leave; 0 where data is only moved.
        roundoff: unit roundoff of the finer of the dtypes in which both are held: a coarser one is no excuse.
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

    def swapped(self) -> "Contrast":
        """The other way round."""
        return Contrast(self.wrong, self.right, self.limit, self.roundoff)

    def within(self, start: int, stop: int) -> "Contrast":
        """Elements `start:stop` alone, of both as one row-major line."""
        right, wrong = (side.reshape(-1)[start:stop] for side in (self.right, self.wrong))
        return Contrast(right, wrong, self.limit, self.roundoff)

    def rest(self, predicted: np.ndarray) -> float:
        """What a prediction of the wrong side leaves unexplained."""
        return distance(self.wrong, predicted)


def accepted(rest: float, difference: float, tolerance: float) -> bool:
    """Whether so small a rest speaks for what left it.

    >>> accepted(1e-9, 1.0, 1e-8), accepted(0.9, 1.0, 2.0), accepted(0.0, 0.0, 1.0)
    (True, False, False)
    """
    return rest <= tolerance and 2 * rest <= difference and difference > 0


def factor_between(x: np.ndarray, y: np.ndarray) -> float:
    """The c of y = c * x, by least squares; 0 of zeros.

    >>> factor_between(np.array([1.0, 2.0]), np.array([3.0, 6.0]))
    3.0
    """
    x, y = x.reshape(-1), y.reshape(-1)
    size = norm(x)
    return float((x / size) @ y) / size if size and math.isfinite(size) else 0.0


def roundoff_of(array: np.ndarray) -> float:
    """The unit roundoff of an array's dtype; 0 of integers."""
    return unit_roundoff(array.dtype.name) if array.dtype.name in FLOATING else 0.0


def is_uninformative(array: np.ndarray, limit: float = 0.0) -> bool:
    """Whether all elements are the same, but for what rounding may leave: zeros, or the ones that a norm starts from, lie in many
    places at once.

    >>> is_uninformative(np.ones(3)), is_uninformative(np.array([1e-9, 0.0]), 1e-8), is_uninformative(np.arange(3.0), 0.1)
    (True, True, False)
    """
    return array.size == 0 or norm(array.astype(np.float64) - float(array.reshape(-1)[0])) <= limit


@dataclass(frozen=True)
class Claim:
    """What other parameters of the step must say for them to tell the same.

    Attributes:
        kind: what is wrong, in a word.
        value, error: a constant that was fitted, and how far it may be off; None of none.
    """

    kind: str
    value: float | None = None
    error: float = 0.0

    def same(self, other: "Claim") -> bool:
        """Whether both say the same thing.

        >>> Claim("factor", 2.0, 0.1).same(Claim("factor", 2.1, 0.1)), Claim("factor", 2.0).same(Claim("factor", 3.0))
        (True, False)
        """
        if self.kind != other.kind or self.value is None or other.value is None:
            return self.kind == other.kind and self.value == other.value
        return abs(self.value - other.value) <= self.error + other.error


@dataclass(frozen=True)
class Fit:
    """A hypothesis that is accepted.

    Attributes:
        signature: its name.
        evidence: a sentence with numbers, without its full stop.
        rest: what it leaves unexplained.
        error: of the prediction itself; see the note above.
        claim: what other parameters of the step must say too.
    """

    signature: str
    evidence: str
    rest: float
    error: float = 0.0
    claim: Claim = Claim("")

    def __post_init__(self) -> None:
        assert self.signature in SIGNATURES, self.signature


def best(fits: Iterable[Fit]) -> Fit | None:
    """The fit to report, or None of none.

    >>> best([Fit("constant_factor", "", 1e-9, 1e-8), Fit("bias_correction", "", 2e-9, 1e-8)]).signature
    'bias_correction'
    >>> best([Fit("constant_factor", "", 1e-9), Fit("bias_correction", "", 2e-9)]).signature
    'constant_factor'
    """

    def order(fit: Fit) -> tuple[bool, float, int, bool]:
        exact = fit.rest <= fit.error
        # That one side is a multiple of the other says less than what of it is.
        plain = fit.claim.kind == PLAIN
        return not exact, 0.0 if exact else fit.rest, SIGNATURES.index(fit.signature), plain

    return min(fits, key=order, default=None)
