"""The activations that are looked for between modules, against their formulas in the math module."""

import math

import numpy as np
import pytest

from crossframe.alignment.elementwise import ACTIVATIONS, activation_between

POINTS = (-7.0, -2.5, -0.5, 0.0, 0.25, 1.5, 6.5)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def leaky(slope):
    return lambda x: x if x > 0 else slope * x


FORMULAS = {
    "ReLU": lambda x: x if x > 0 else 0.0,
    "GELU": lambda x: x * math.erfc(-x / 2**0.5) / 2,
    "GELU by tanh": lambda x: x * sigmoid(2 * (2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)),
    "SiLU": lambda x: x * sigmoid(x),
    "ReLU6": lambda x: min(max(x, 0.0), 6.0),
    "sigmoid": sigmoid,
    "tanh": math.tanh,
    "hard swish": lambda x: 0.0 if x <= -3 else x if x >= 3 else x * (x + 3) / 6,
    "hard sigmoid": lambda x: 0.0 if x <= -3 else 1.0 if x >= 3 else (x + 3) / 6,
    "ELU": lambda x: x if x > 0 else math.exp(x) - 1,
    "softplus": lambda x: math.log(1 + math.exp(x)),
    "mish": lambda x: x * math.tanh(math.log(1 + math.exp(x))),
    "squared ReLU": lambda x: x**2 if x > 0 else 0.0,
    "leaky ReLU of slope 0.01": leaky(0.01),
    "leaky ReLU of slope 0.1": leaky(0.1),
    "leaky ReLU of slope 0.2": leaky(0.2),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_that_of_its_formula(name):
    found = ACTIVATIONS[name](np.array(POINTS))
    # A formula rounds some ten times, at values of up to 1 that partly cancel.
    np.testing.assert_allclose(found, [FORMULAS[name](x) for x in POINTS], rtol=16 * 2.0**-52, atol=16 * 2.0**-52)


X = np.array([-3.0, 4.0, 12.0, 0.0])
Y = np.array([0.0, 4.0, 12.0, 0.0])
"""ReLU of X; its norm is 160**0.5, and 3 that of Y - X."""


@pytest.mark.parametrize(
    ("y", "near", "found"),
    [
        pytest.param(Y, 1e-6, "ReLU", id="equal"),
        pytest.param(Y + np.array([0.0, 0.0, 0.0, 0.99e-3 * 160**0.5]), 1e-3, "ReLU", id="within the distance"),
        pytest.param(Y + np.array([0.0, 0.0, 0.0, 1.01e-3 * 160**0.5]), 1e-3, None, id="beyond the distance"),
        pytest.param(Y, 2.99 / 160**0.5, "ReLU", id="farther than the distance"),
        pytest.param(Y, 3.01 / 160**0.5, None, id="as near without an activation"),
        pytest.param(np.zeros(4), 1e-3, None, id="zeros"),
        pytest.param(np.array([0.0, 4.0, np.nan, 0.0]), 1e-3, None, id="not finite"),
        pytest.param(0.1 * X, 1e-3, None, id="scaled"),
    ],
)
def test_an_activation_lies_between_arrays_within_a_distance(y, near, found):
    assert activation_between(X, y, near) == found
    assert activation_between(X.reshape(2, 2), y.reshape(2, 2), near) == found


def test_values_that_are_not_finite_show_no_activation():
    assert activation_between(np.array([-np.inf, 4.0]), np.array([0.0, 4.0]), 1e-3) is None


@pytest.mark.parametrize("wrong", [2, 3])
def test_all_elements_have_the_activation(wrong):
    """Every second one is tried first."""
    x = np.linspace(-1.0, 1.0, 1 << 13)
    y = np.maximum(x, 0.0)
    assert activation_between(x, y, 1e-6) == "ReLU"
    y[wrong] += 1e-3
    assert activation_between(x, y, 1e-6) is None
