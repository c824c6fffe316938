"""Unexpected moves of parameters between recorded steps, on both sides of each bound."""

import math
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from crossframe.monitoring import updates
from crossframe.monitoring.updates import UnexpectedMove, UpdateRule
from crossframe.verdict.measure.values import Side

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ADAMW = {"optimizer": "AdamW", "betas": [0.5, 0.75], "weight_decay": 0.0}
FARTHEST = math.sqrt(1.5)
"""(1 - 0.5) / sqrt((1 - 0.75) * (1 - 0.5^2 / 0.75))"""
RESERVE = math.sqrt(1 + 6 * math.sqrt(2 / 256))


@pytest.fixture
def unexpected(monkeypatch):
    """A function that returns the unexpected moves of one parameter, "w", at its last recorded step."""
    monkeypatch.setattr(updates, "assemble", lambda recording, *at: Side(recording.values.get(at, np.zeros(1))))

    def found(before, after, *, rates=(0.1,), settings=ADAMW, count=1.0, gradient=None):
        """`before` is recorded at step 0, and `after` as many steps later as there are rates."""
        last = len(rates)
        values = {("parameters", 0, "w"): before, ("update", 0, "w"): before, ("update", last, "w"): after}
        values["reduce", last, "w"] = np.ones(1) if gradient is None else gradient
        recording = recorded(values, (0.0, *rates), settings, count)
        rule = UpdateRule()
        assert list(rule.add(recording, 0)) == []
        return list(rule.add(recording, last))

    return found


def recorded(values, rates, settings=ADAMW, count=1.0):
    """A fake recording. Its optimizer has two parameter groups; a rate of None is not recorded."""
    return SimpleNamespace(
        values=values,
        manifest=SimpleNamespace(settings=settings, params={"w": None}, learning_rate=0.1),
        has=lambda *at: at in values,
        learning_rates=lambda step: () if rates[step] is None else (rates[step], rates[step] / 2),
        count=lambda *_: count,
    )


def one(value, dtype=np.float64):
    """16 elements, of which the first is not zero: a sketch measures its distances exactly."""
    return np.array([value, *[0.0] * 15]).astype(dtype)


@pytest.mark.parametrize(
    ("before", "sign", "rates", "settings", "most"),
    [
        pytest.param(0.0, 1, (0.1,), ADAMW, 0.1 * FARTHEST * 4, id="one step"),
        pytest.param(0.0, 1, (0.1, 0.3), ADAMW, 0.4 * FARTHEST * 4, id="two steps"),
        pytest.param(0.0, 1, (0.1,), ADAMW | {"optimizer": "Adam", "weight_decay": 0.5}, 0.1 * FARTHEST * 4, id="Adam"),
        pytest.param(
            9.0,
            -1,
            (0.1, 0.1),
            ADAMW | {"weight_decay": 0.5},
            0.2 * (FARTHEST * 4 + 0.5 * (9.0 + 0.2 * FARTHEST * 4)),
            id="decay of the larger parameters before",
        ),
        # The norm after it is 9 + 1.2371 most, and most = 0.1 (4 c + 0.5 (9 + 1.2371 most + 0.1 * 4 c)).
        pytest.param(
            9.0,
            1,
            (0.1,),
            ADAMW | {"weight_decay": 0.5},
            0.1 * (FARTHEST * 4 + 0.5 * (9.0 + 0.1 * FARTHEST * 4)) / (1 - 0.05 * RESERVE),
            id="decay of the larger parameters after",
        ),
    ],
)
def test_a_move_is_bounded_by_rates_and_decay(unexpected, before, sign, rates, settings, most):
    farthest = sign * RESERVE * most
    assert unexpected(one(before), one(before + 0.9999 * farthest), rates=rates, settings=settings) == []
    (found,) = unexpected(one(before), one(before + 1.0001 * farthest), rates=rates, settings=settings)
    steps = f"{len(rates)} step{'s' if len(rates) > 1 else ''}"
    assert (found.parameter, found.lost) == ("w", False)
    assert found.text == (
        f"moved by {RESERVE * most:.3g} (norm) in {steps}, and {settings['optimizer']} moves it by at most {most:.3g} at these "
        "rates: something else wrote to it"
    )


def test_rounding_of_each_step_may_move_a_parameter(unexpected):
    """Each of two steps rounds a number of about 256 by at most 256 * 2^-8, in all by 2; the numbers there are 2 apart."""
    options = {"rates": (1e-6, 1e-6)}
    assert unexpected(one(256.0, BFLOAT16), one(258.0, BFLOAT16), **options) == []
    (found,) = unexpected(one(256.0, BFLOAT16), one(260.0, BFLOAT16), **options)
    assert found.text.startswith("moved by 4 (norm) in 2 steps, and AdamW moves it by at most 2.03 at")
    assert unexpected(one(258.0, BFLOAT16), one(256.0, BFLOAT16), **options) == []
    (found,) = unexpected(one(260.0, BFLOAT16), one(256.0, BFLOAT16), **options)
    assert "at most 2.03 at" in found.text


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"optimizer": "SGD"}, id="SGD"),
        pytest.param({"optimizer": "Lion"}, id="another optimizer"),
        pytest.param({}, id="no optimizer"),
        pytest.param(ADAMW | {"betas": None}, id="betas unknown"),
        pytest.param(ADAMW | {"betas": [0.5, 0.25]}, id="squares forgotten as fast"),
        pytest.param(ADAMW | {"betas": [0.5, 1.0]}, id="squares are never updated"),
    ],
)
def test_moves_without_a_bound_are_not_judged(unexpected, settings):
    assert unexpected(one(0.0), one(1e9), settings=settings) == []


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"rates": (None,)}, id="rate not recorded"),
        pytest.param({"rates": (0.1, None)}, id="rate of one step not recorded"),
    ],
)
def test_steps_without_rates_are_not_judged(unexpected, change):
    assert unexpected(one(0.0), one(1e9), **change) == []
    assert unexpected(one(1.0), one(1.0), **change) == []


def test_parameters_that_are_not_finite_are_not_judged(unexpected):
    assert unexpected(one(0.0), np.array([1e9, np.nan])) == []


def test_the_first_step_moves_from_the_initial_values(unexpected):
    def found(values):
        return list(UpdateRule().add(recorded(values, (0.1,)), 0))

    values = {("parameters", 0, "w"): one(1.0), ("update", 0, "w"): one(1e9)}
    (only,) = found(values)
    assert only.text.startswith("moved by 1e+09 (norm) in 1 step, and AdamW")


def test_a_parameter_is_judged_from_its_second_record(unexpected):
    rule = UpdateRule()
    values = {("parameters", 0, "other"): one(1.0)}
    for step, value in enumerate((0.0, 1e9, -1e9)):
        found = list(rule.add(recorded(values | {("update", step + 3, "w"): one(value)}, (0.1,) * 6), step + 3))
        assert bool(found) is (step > 0)


@pytest.mark.parametrize(
    ("settings", "gradient", "threshold"),
    [
        # A step of the rate, next to half the distance of numbers at 1, which is 2^-8.
        pytest.param(ADAMW, np.ones(16), 2.0**-8, id="AdamW"),
        # A step of the rate times 0.5, the root mean square of the gradient.
        pytest.param({"optimizer": "SGD"}, np.full(16, 0.5), 2.0**-7, id="SGD"),
    ],
)
@pytest.mark.parametrize("steps", [1, 2])
def test_updates_smaller_than_rounding_are_lost(unexpected, settings, gradient, threshold, steps):
    kept = np.ones(16).astype(BFLOAT16)

    def found(rate):
        return unexpected(kept, kept, rates=(0.0,) * (steps - 1) + (rate,), settings=settings, gradient=gradient)

    text = f"did not change in {steps} step{'s' if steps > 1 else ''}"
    text += ", although it has a gradient and the optimizer counts steps for it"
    assert found(threshold) == [UnexpectedMove("w", text)]
    text += ": its updates are smaller than rounding in bfloat16"
    assert found(0.999 * threshold) == [UnexpectedMove("w", text, lost=True)]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"count": None}, id="no count"),
        pytest.param({"count": 0.0}, id="no step counted"),
        pytest.param({"rates": (0.0, 0.0)}, id="rate of zero"),
        pytest.param({"gradient": np.zeros(16)}, id="gradient of zero"),
        pytest.param({"gradient": np.array([1.0, np.inf])}, id="gradient not finite"),
    ],
)
def test_parameters_that_need_not_move_are_not_found(unexpected, change):
    assert unexpected(one(1.0), one(1.0)) != []
    assert unexpected(one(1.0), one(1.0), **change) == []
