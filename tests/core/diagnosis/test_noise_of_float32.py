"""Which differences in float64 look like rounding in float32: their size, number and lack of direction, at the limits."""

from typing import Any, cast

import numpy as np
import pytest

from crossframe.verdict.diagnosis.case import Case
from crossframe.verdict.diagnosis.fit import Contrast
from crossframe.verdict.diagnosis.module_hypotheses import noise_of_float32

ROUNDOFF = 2.0**-24
SIGNS = np.resize([1.0, -1.0, -1.0, 1.0], 64)
"""Of a difference: neither their sum nor their product with the values is other than 0."""
VALUES = np.resize([1.0, -1.0], 64)


class Given:
    """What the function reads of a case."""

    def __init__(
        self, apart: np.ndarray, values: np.ndarray = VALUES, step: int = 0, roundoff: float = 2.0**-53
    ) -> None:
        self.sides = Contrast(values, values + apart, 0.0)
        self.step, self.compute_roundoff = step, roundoff


def noise(*given: Any, **other: Any) -> bool:
    return noise_of_float32(cast(Case, Given(*given, **other)))


@pytest.mark.parametrize(
    ("roundings", "expected"), [(1 / 8, True), (0.124, False), (1.0, True), (16.0, True), (16.01, False), (0.0, False)]
)
def test_an_eighth_to_sixteen_roundings_are_noise(roundings: float, expected: bool) -> None:
    assert noise(roundings * ROUNDOFF * SIGNS) is expected


def test_noise_is_of_the_first_step_in_a_finer_dtype() -> None:
    assert not noise(ROUNDOFF * SIGNS, step=1) and not noise(ROUNDOFF * SIGNS, roundoff=ROUNDOFF)
    assert noise(ROUNDOFF * SIGNS, roundoff=ROUNDOFF / 2) and not noise(ROUNDOFF * SIGNS, np.zeros(64))


def test_fewer_than_64_differing_elements_have_no_direction() -> None:
    more = np.append(ROUNDOFF * SIGNS, np.zeros(4)), np.append(VALUES, np.ones(4))
    assert noise(*more)
    fewer = more[0].copy()
    fewer[:4] = 0
    assert not noise(fewer, more[1])


@pytest.mark.parametrize(("num_positive", "expected"), [(48, True), (50, False), (16, True), (14, False)])
def test_a_sum_beyond_four_deviations_is_a_direction(num_positive: int, expected: bool) -> None:
    """Of n signs, the sum has a standard deviation of sqrt(n): 48 - 16 is four of them."""
    signs = np.where(np.arange(64) < num_positive, 1.0, -1.0)
    values = np.zeros(64)
    values[:num_positive:2], values[1:num_positive:2] = 1.0, -1.0
    assert noise(ROUNDOFF * signs, values if num_positive > 20 else -values[::-1]) is expected
    # The product with the values is one too.
    assert noise(ROUNDOFF * SIGNS, SIGNS * signs) is expected
