"""The optimizer that a manifest states: defaults, groups of parameters, and settings that state no rule."""

import math
from dataclasses import replace
from typing import Any

import pytest

from crossframe.verdict.diagnosis.optimizer_rules import SGD, AdamW
from crossframe.verdict.diagnosis.stated_optimizer import Stated, stated_rule
from tests.core.helpers.faulty import RATE, manifest


def stated(kind: str, name: str = "w", count: float = 3, **settings: Any) -> Stated | None:
    made = replace(manifest(2, "float32", kind, None), settings={"optimizer": kind} | settings)
    return stated_rule(made, kind, count, name)


DEFAULT = AdamW(RATE, 0.9, 0.999, 1e-8, 0.01, 3, 3)


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        pytest.param("AdamW", {}, Stated("AdamW", DEFAULT, 0.0, math.inf, states_decay=False), id="AdamW"),
        pytest.param(
            "AdamW",
            {"lr": 0.5, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.2, "clip": 2.0},
            Stated("AdamW", AdamW(0.5, 0.8, 0.95, 1e-6, 0.2, 3, 3), 0.0, 2.0),
            id="AdamW with everything",
        ),
        pytest.param("AdamW", {"lr": 0}, Stated("AdamW", replace(DEFAULT, rate=1.0), 0.0, math.inf, False), id="no rate"),
        pytest.param("Adam", {}, Stated("Adam", replace(DEFAULT, decay=0.0), 0.0, math.inf, False), id="Adam"),
        pytest.param(
            "Adam", {"weight_decay": 0.2}, Stated("Adam", replace(DEFAULT, decay=0.0), 0.2, math.inf), id="Adam decays"
        ),
        pytest.param("SGD", {}, Stated("SGD", SGD(RATE, 0.0, 0.0), 0.0, math.inf), id="SGD"),
        pytest.param(
            "SGD",
            {"momentum": 0.9, "weight_decay": 0.2, "clip": 0},
            Stated("SGD", SGD(RATE, 0.9, 0.2), 0.2, 0.0),
            id="SGD with everything",
        ),
    ],
)  # fmt: skip
def test_settings_state_a_rule(kind: str, settings: dict, expected: Stated) -> None:
    assert stated(kind, **settings) == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"betas": None},
        {"betas": [-0.1, 0.99]},
        {"betas": [0.9, -0.1]},
        {"weight_decay": None},
        {"weight_decay": -0.1},
        {"momentum": -0.1},
        {"eps": None},
        {"eps": -1e-8},
        {"clip": -1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD"])
def test_settings_without_a_value_state_no_rule(kind: str, settings: dict) -> None:
    assert stated(kind, **settings) is None


def test_a_group_of_parameters_has_settings_of_its_own() -> None:
    groups = [
        {"params": ["other"], "lr": 3.0},
        {"params": ["w", "v"], "lr": 2.0, "weight_decay": 0.0},
        {"params": ["w"]},
    ]
    found = stated("AdamW", param_groups=groups, weight_decay=0.2)
    assert found is not None and found.rule == replace(DEFAULT, rate=2.0, decay=0.0) and found.states_decay
    other = stated("AdamW", "u", param_groups=groups, weight_decay=0.2)
    assert other is not None and other.rule == replace(DEFAULT, decay=0.2)
