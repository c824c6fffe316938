"""The optimizer that a manifest states, and what recorded values show of one: its rule, its moments and its betas."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crossframe.layout import FlatLayout
from crossframe.param_map import identity_map
from crossframe.params import ParamSpec
from crossframe.recording import Recording, RecordingWriter, create_recording
from crossframe.verdict.diagnosis.optimizer_rules import SGD, AdamW
from crossframe.verdict.diagnosis.stated_optimizer import (
    ADAM,
    ADAMW,
    MOMENTS,
    Stated,
    betas_of,
    rule_of,
    slots_of,
    stated_rule,
)
from tests.core.helpers.faulty import DECAY, OWN_ADAM, RATE, manifest


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
        pytest.param(
            "AdamW",
            {"eps_hat": 1e-6},
            Stated("AdamW", replace(DEFAULT, epsilon=1e-6 / math.sqrt(1 - 0.999**3)), 0.0, math.inf, states_decay=False),
            id="epsilon hat",
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


def recorded(folder: Path, steps: list[dict[str, Mapping[str, np.ndarray]]]) -> Recording:
    """A recording with the values of each step by kind ("gradient", "after" or an optimizer state entry) and parameter.

    The first step also has the kind "before".
    """
    first = steps[0]["before"]
    layout = FlatLayout(tuple(ParamSpec(name, x.shape, "float64") for name, x in first.items()), 1, True)
    made = replace(manifest(1, "float64", OWN_ADAM, None), param_map=identity_map(first), units=(("", layout),))
    create_recording(folder, replace(made, steps=len(steps)))
    with RecordingWriter(folder, replace(made, steps=len(steps)), 0) as writer:
        for step, kinds in enumerate(steps):
            writer.batch(step, "0" * 64, [])
            writer.loss(step, 1.0)
            for kind, values in kinds.items():
                pieces = {name: (0, x.size, x.reshape(-1)) for name, x in values.items()}
                match kind:
                    case "before":
                        writer.parameters(step, "", pieces)
                    case "gradient":
                        writer.reduced_grads(step, "", pieces)
                    case "after":
                        writer.updated(step, "", pieces)
                    case _:
                        writer.state(step, "", kind, pieces)
            writer.end_step(step)
    return Recording.open(folder)


@pytest.mark.parametrize(
    ("sizes", "entries", "rule"),
    [
        pytest.param((1, 2), ("z", "y"), ADAMW, id="two elements"),
        pytest.param((1, 1), ("z", "y"), None, id="single numbers"),
        pytest.param((1, 1), MOMENTS[ADAM], None, id="single numbers with the usual entries"),
    ],
)
def test_two_elements_show_a_rule_and_its_moments(
    sizes: tuple[int, int], entries: tuple[str, str], rule: str | None, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    before, gradient = ({f"p{i}": rng.standard_normal(size) for i, size in enumerate(sizes)} for _ in range(2))
    first, second = ({name: gain * g**power for name, g in gradient.items()} for gain, power in ((0.1, 1), (0.001, 2)))
    right = replace(DEFAULT, decay=DECAY, count_m=1, count_v=1)
    after = {name: right.updated(x, first[name], second[name]) for name, x in before.items()}
    moments = dict(zip(entries, (first, second), strict=True))
    run = recorded(tmp_path / "run", [{"before": before, "gradient": gradient, **moments, "after": after}])
    assert slots_of(run, ADAM) == (entries if rule else MOMENTS[ADAM])
    assert rule_of(run) == rule


OLD, GRADIENT, UNRELATED = np.random.default_rng(1).standard_normal((3, 3))


@pytest.mark.parametrize(
    ("old", "new", "beta"),
    [
        pytest.param(OLD, 0.8 * OLD + 0.3 * GRADIENT, 0.8, id="running average"),
        pytest.param(OLD, UNRELATED, None, id="unrelated values"),
        pytest.param(np.zeros(3), 0.3 * GRADIENT, None, id="no values before"),
        pytest.param(OLD, 1.5 * OLD + 0.3 * GRADIENT, None, id="growing sum"),
        pytest.param(OLD, -0.5 * OLD + 0.3 * GRADIENT, None, id="alternating sum"),
    ],
)
def test_betas_are_those_of_running_averages(
    old: np.ndarray, new: np.ndarray, beta: float | None, tmp_path: Path
) -> None:
    square = np.square(OLD)
    steps = [
        {"before": {"w": OLD}, "exp_avg": {"w": old}, "exp_avg_sq": {"w": square}},
        {"gradient": {"w": GRADIENT}, "exp_avg": {"w": new}, "exp_avg_sq": {"w": 0.99 * square + 0.01 * GRADIENT**2}},
    ]
    assert betas_of(recorded(tmp_path / "run", steps)) == (beta and (beta, 0.99))
