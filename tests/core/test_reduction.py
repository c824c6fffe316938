"""Divide factors (R26, R27)."""

import math
from fractions import Fraction

import pytest

from crossframe.errors import MeshError, PlanError
from crossframe.reduction import DivideFactors, custom_factors, divide_factors, mean_factors

SIZES = range(1, 65)


def split(num_ranks: int) -> tuple[Fraction, Fraction]:
    """The first power of two that does not divide the number of ranks, or is no less than what it leaves."""
    before = next(f for f in (2**i for i in range(8)) if num_ranks % f or Fraction(num_ranks, f) <= f)
    return Fraction(before), Fraction(num_ranks, before)


@pytest.mark.parametrize("num_ranks", SIZES)
def test_R26_the_factors_are_the_rules_and_their_product_is_the_number_of_ranks(num_ranks):
    factors = divide_factors(num_ranks)
    assert (factors.before, factors.after) == split(num_ranks)
    assert factors.before * factors.after == num_ranks
    assert type(factors.before) is type(factors.after) is float
    # The division is split: neither side takes more than the square root, but for the last doubling.
    assert factors.before < 2 * math.sqrt(num_ranks)
    assert factors.after < num_ranks or num_ranks == 1


@pytest.mark.parametrize(
    ("num_ranks", "before", "after"),
    [(1, 1, 1), (2, 2, 1), (3, 2, 1.5), (4, 2, 2), (5, 2, 2.5), (6, 4, 1.5), (7, 2, 3.5), (8, 4, 2), (9, 2, 4.5),
     (12, 4, 3), (16, 4, 4), (20, 8, 2.5), (24, 8, 3), (32, 8, 4), (36, 8, 4.5), (48, 8, 6), (64, 8, 8)],
)  # fmt: skip
def test_R26_the_values_that_torch_takes(num_ranks, before, after):
    assert divide_factors(num_ranks) == DivideFactors(before, after)


@pytest.mark.parametrize("num_ranks", SIZES)
def test_R26_fsdp2_averages_in_the_collective_for_two_dtypes_and_splits_for_the_others(num_ranks):
    for dtype in ("float32", "bfloat16"):
        assert mean_factors(num_ranks, dtype) == DivideFactors(1.0, num_ranks)
    for dtype in ("float64", "float16"):
        assert mean_factors(num_ranks, dtype) == divide_factors(num_ranks)


def test_R27_a_custom_factor_divides_once_ahead_of_the_sum():
    assert custom_factors(3) == DivideFactors(3.0, 1.0)
    assert custom_factors(0.25) == DivideFactors(0.25, 1.0)
    assert type(custom_factors(3).before) is float


@pytest.mark.parametrize("factor", [0, -1.0, math.nan, math.inf, "2", None, True, [2.0]])
def test_R27_a_custom_factor_that_cannot_divide_is_refused(factor):
    with pytest.raises(PlanError, match="above 0"):
        custom_factors(factor)


@pytest.mark.parametrize("num_ranks", [0, -2, 2.0, True, None, "2"])
def test_a_number_of_ranks_that_is_none_is_refused(num_ranks):
    for factors in (divide_factors, lambda n: mean_factors(n, "float32")):
        with pytest.raises(MeshError, match="world size"):
            factors(num_ranks)
