"""Norms and GELUs among recorded activations, and what each side computes from its own input."""

import numpy as np
import pytest

from crossframe.alignment.elementwise import gelu_by_erf, gelu_by_tanh, relu
from crossframe.dtypes import numpy_dtype
from crossframe.verdict.perturbed_runs.norms_and_gelus import Estimates, Recogniser
from tests.core.helpers.quantities import quantity

LOW = numpy_dtype("bfloat16")
WEIGHT, BIAS = np.linspace(0.5, 2, 8), np.linspace(-3, 3, 8)


def low(array):
    """Rounded to bfloat16, in float64."""
    return array.astype(LOW).astype(np.float64)


def estimates(x, y, weight=WEIGHT):
    """The estimates of the output of a module of which both sides have the same input and output."""
    recogniser = Recogniser()
    recogniser.note_weights([quantity(weight, weight, phase="parameters", parameter="norm.weight")])
    made = [
        quantity(side.astype(LOW), side.astype(LOW), phase="forward", module="norm", use=use, parameter="")
        for side, use in ((x, "input"), (y, "output"))
    ]
    recogniser.estimates([made[0]])
    return recogniser.estimates([made[1]])


@pytest.mark.parametrize("bias", [0.0, BIAS], ids=["alone", "bias"])
def test_a_batch_norm_is_recognised_whose_every_operation_rounds(bias):
    x = low(np.random.default_rng(0).normal(0.5, 0.3, size=(500, 8)))
    apart, reciprocal = low(x - x.mean(axis=0)), low(1 / np.sqrt(x.var(axis=0) + 1e-5))
    y = low(low(low(apart * reciprocal) * WEIGHT) + bias)
    found = estimates(x, y)
    assert found.gain == 0.0 and len(found.statistics) == 8


def test_the_gain_is_that_of_channels_that_vary_on_both_sides():
    # By channel: a small one, one with a negative gain, and those that do not vary in one recording or in both.
    squares_a, gain_a = np.array([0.25, 0.25, 0.25, 0.0, 0.0]), np.array([1.0, -1.0, 1.0, 1.0, 1.0])
    squares_b, gain_b = np.array([0.25, 0.25, 0.0, 0.25, 0.0]), np.array([1.1, -1.3, 1.0, 1.0, 1.0])
    assert Estimates(
        gains=np.stack([gain_a * squares_a, squares_a, gain_b * squares_b, squares_b])
    ).gain == pytest.approx(0.2)
    assert Estimates(gains=np.zeros((4, 2))).gain is None


@pytest.mark.parametrize(("off", "recognised"), [(0.015, True), (0.025, False)])
def test_a_gain_is_the_weight_up_to_five_roundings(off, recognised):
    """5 u are 2 % in bfloat16. A function that is affine in each channel has another gain."""
    x = low(np.random.default_rng(0).normal(size=(500, 8)))
    y = (x - x.mean(axis=0)) / x.std(axis=0) * WEIGHT
    assert (estimates(x, np.where(np.arange(8) == 3, 1 + off, 1) * y).gain is not None) is recognised


@pytest.mark.parametrize(
    ("acts", "tanh"),
    [
        pytest.param((gelu_by_erf, gelu_by_erf), 0.0, id="erf"),
        pytest.param((gelu_by_erf, gelu_by_tanh), 1.0, id="erf and tanh"),
        pytest.param((gelu_by_tanh, gelu_by_erf), -1.0, id="tanh and erf"),
        pytest.param((gelu_by_erf, relu), None, id="on one side"),
    ],
)
def test_a_gelu_is_recognised_on_both_sides(acts, tanh):
    recogniser, x = Recogniser(), np.random.default_rng(0).normal(size=(50, 8))
    sides = (x, x + 1e-3), [act(each) for act, each in zip(acts, (x, x + 1e-3), strict=True)]
    of_both = [
        quantity(*each, phase="forward", module=name, use="output", parameter="")
        for name, each in zip("xy", sides, strict=True)
    ]
    assert recogniser.estimates([of_both[0]]).tanh is None
    found = recogniser.estimates([of_both[1]]).tanh
    assert found == (None if tanh is None else pytest.approx(tanh, abs=1e-9))


def test_a_function_of_positions_is_no_norm_whatever_their_number():
    """A module that scales each position looks like a batch norm, whose channels sequences of two lengths would not have."""
    recogniser, found = Recogniser(), Estimates()
    for length in (40, 13):
        x = np.random.default_rng(0).normal(size=(6, length, 8))
        y = (x - x.mean(axis=(0, 2), keepdims=True)) * np.linspace(1, 2, length)[:, None]
        for use, value in (("input", x), ("output", y)):
            made = quantity(value, value, phase="forward", module="scale", use=use, parameter="", microbatch=length)
            one = recogniser.estimates([made])
            if use == "output":
                assert (one.gain is None) is (length == 13)
                found += one
    assert found.gain == 0.0
