"""Metrics, bounds and verdicts by themselves."""

import math

import numpy as np
import pytest

from crossframe.cli.exit_status import exit_status
from crossframe.verdict import Verdict, bounds_for, overall
from crossframe.verdict.measure.judge import Judgement, judge
from crossframe.verdict.measure.metrics import (
    distance,
    gradient_scale,
    norm,
    parameter_scale,
    ratio,
    root_mean_square,
)
from crossframe.verdict.measure.quantities import Quantity


def of_gradient(a, b, noise_scale):
    """A gradient's difference, as `walk` yields it."""
    return ratio(distance(a, b), gradient_scale(norm(a), noise_scale))


def test_a_norm_neither_overflows_nor_underflows():
    assert norm(np.array([3e-200, 4e-200])) == pytest.approx(5e-200, rel=1e-15)
    assert norm(np.array([3e200, 4e200])) == pytest.approx(5e200, rel=1e-15)
    assert norm(np.array([])) == 0.0
    assert norm(np.array([1.0, np.inf])) == math.inf


def test_norms_are_summed_in_float64():
    assert norm(np.ones(4097, np.float16)) == math.sqrt(4097)  # in float16, 4096 + 1 is 4096


def test_differences_are_taken_in_float64():
    a = np.full(4, 60000, np.float16)
    assert ratio(distance(a, -a), parameter_scale(norm(a), a.size, 0.0, 0.0, 1)) == 2.0


@pytest.mark.parametrize(
    ("a", "update", "rate", "steps", "scale"),
    [(3.0, 0.0, 0.0, 1, 6.0), (0.0, 0.5, 0.0, 1, 0.5), (0.0, 0.0, 0.1, 10, 2.0), (0.0, 0.0, 0.0, 1, 0.0)],
)
def test_a_parameter_is_measured_by_the_largest_of_three(a, update, rate, steps, scale):
    assert parameter_scale(norm(np.full(4, a)), 4, update, rate, steps) == pytest.approx(scale)


def test_differences_without_anything_to_measure_by():
    zeros = np.zeros(2)
    assert ratio(distance(zeros, zeros), parameter_scale(0.0, 2, 0.0, 0.0, 1)) == 0.0
    assert ratio(distance(zeros, np.ones(2)), parameter_scale(0.0, 2, 0.0, 0.0, 1)) == math.inf
    assert ratio(1.0, 2.0) == 0.5
    assert ratio(1.0, 0.0) == math.inf
    assert root_mean_square(0.0, 0) == 0.0


def test_a_gradient_below_the_noise_is_measured_by_the_noise():
    assert of_gradient(np.array([3.0]), np.array([4.0]), 0.5) == pytest.approx(1 / 3)
    assert of_gradient(np.array([1e-3]), np.array([-1e-3]), 0.5) == pytest.approx(4e-3)


def test_what_summation_may_leave_is_just_within_the_bound():
    bounds, terms, numel = bounds_for("float64"), 100, 9
    left = terms * 2.0**-53 * 0.3  # on each side, in opposite directions, with gradients of size 0.3
    scale = bounds.noise_scale(terms, 0.3, numel)
    assert of_gradient(np.full(numel, left), np.full(numel, -left), scale) == pytest.approx(bounds.parameter)


def test_bounds_follow_the_roundoff():
    assert bounds_for("float32").loss == pytest.approx(1e-12 * 2**29)
    assert bounds_for("float32").parameter == pytest.approx(1e-11 * 2**29)
    assert [bounds_for(dtype).decisive for dtype in ("float64", "float32", "float16", "bfloat16")] == [1, 1, 0, 0]
    assert bounds_for("bfloat16").parameter == 0.5


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ("equal equal", "equal"),
        ("equal rounding", "rounding"),
        ("rounding inconclusive", "inconclusive"),
        ("incomparable inconclusive rounding", "incomparable"),
        ("equal incomparable bug", "bug"),
    ],
)
def test_the_gravest_verdict_is_the_overall_one(verdicts, expected):
    assert overall([Verdict(verdict) for verdict in verdicts.split()]) is Verdict(expected)


def test_of_no_bound_any_difference_is_beyond_all_use():
    array = np.zeros(1)
    moved = Quantity(0, "parameters", "all_gather", "", "w", None, 0, array, array, 1.0, None)
    assert Judgement(moved, False, 1e-9, True, False, False).used == math.inf
    assert judge(moved).used == 0.0
    half = Quantity(0, "update", "optimizer", "", "w", None, 0, array, array + 1, 4.0, 0.5)
    assert judge(half).used == 0.5


def test_exit_statuses():
    assert {verdict.value: exit_status(verdict) for verdict in Verdict} == {
        "equal": 0, "rounding": 0, "bug": 1, "inconclusive": 3, "incomparable": 4, "different computation": 5
    }  # fmt: skip
