"""Settings that differ between two recordings: which are found, what they explain, and how they are described."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crossframe.param_map import identity_map
from crossframe.recording import Recording, RecordingWriter, create_recording
from crossframe.recording.event_format import BACKWARD, FORWARD, PARAMETERS, REDUCE, STATE, UNSHARDED, UPDATE
from crossframe.verdict import Verdict, compare
from crossframe.verdict.measure.comparable import (
    Setting,
    _are_one,
    differing_settings,
    exempt_on_one_side,
    labels,
    why_incomparable,
)
from crossframe.verdict.measure.locate import Divergence
from tests.core.helpers import faulty, synthetic

PHASES = (PARAMETERS, UNSHARDED, FORWARD, BACKWARD, REDUCE, STATE, UPDATE)


def where(phase: str, step: int = 2, parameter: str | None = None) -> Divergence:
    return Divergence(step, phase, 0, "", parameter, None, None, phase)


@pytest.mark.parametrize(
    ("acts_in", "explained"),
    [(None, ()), (PARAMETERS, (PARAMETERS, FORWARD, STATE, UPDATE)), (STATE, (STATE, UPDATE)), (UPDATE, (UPDATE,))],
)
def test_a_setting_explains_the_phases_from_its_own_on(acts_in: str | None, explained: tuple[str, ...]) -> None:
    setting = Setting("x", 1, 2, acts_in, since=2)
    phases = [phase for phase in PHASES if phase in (PARAMETERS, UNSHARDED, FORWARD, STATE, UPDATE)]
    assert tuple(phase for phase in phases if setting.explains(where(phase))) == explained
    for phase in PHASES:
        assert not setting.explains(where(phase, 1))
        assert setting.explains(where(phase, 3)) == (acts_in is not None and phase != UNSHARDED)


def test_a_setting_of_forward_explains_all_that_follows() -> None:
    found = [phase for phase in PHASES if Setting("x", 1, 2, FORWARD).explains(where(phase, 0))]
    assert found == [FORWARD, BACKWARD, REDUCE, STATE, UPDATE]


def test_a_setting_of_some_parameters_explains_them_in_its_step() -> None:
    some = Setting("x", 1, 2, STATE, 2, ("a", "b"), 5)
    assert (
        some.explains(where(STATE, 2, "b")) and some.explains(where(STATE, 2)) and some.explains(where(STATE, 3, "c"))
    )
    assert not some.explains(where(STATE, 2, "c"))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (Setting("learning_rate", 0.1, 0.2, UPDATE), "learning rate differs: 0.1 in a, 0.2 in b"),
        (Setting("eps", 1, 2, UPDATE, since=3), "eps differs from step 3 on: 1 in a, 2 in b"),
        (
            Setting("eps", 1, 2, UPDATE, 0, ("w", "v"), 5),
            "eps of 2 of 5 parameters (first 'w') differs: 1 in a, 2 in b",
        ),
        (
            Setting("model", "x", "y", None),
            "model differs: 'x' in a, 'y' in b; if both are one model, record both with the same Recorder(..., name=...)",
        ),
        (Setting("batch", "", "", FORWARD, text="the batch differs"), "the batch differs"),
    ],
)
def test_a_setting_is_described_with_both_values(setting: Setting, said: str) -> None:
    assert setting.describe(("a", "b")) == said


def run(folder: Path, world_size: int = 2, rates: list[list[float]] | None = None, **fields: Any) -> Recording:
    synthetic.record(folder, synthetic.manifest(world_size, **fields))
    for rank in range(world_size if rates else 0):
        for step, rate in enumerate(rates or []):
            line = f'{{"event": "step", "step": {step}, '
            synthetic.edit_events(folder, line, f'{line}"rates": {rate}, ', rank=rank)
    return Recording.open(folder)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({}, {}, ()),
        ({"seed": 1}, {"seed": 2}, (Setting("seed", 1, 2, PARAMETERS),)),
        ({"seed": None}, {"seed": 2}, ()),
        ({"model": "x"}, {"model": "y"}, (Setting("model", "x", "y", None),)),
        ({"learning_rate": 0.5}, {"learning_rate": 0.1}, (Setting("learning_rate", 0.5, 0.1, UPDATE),)),
        (
            {"settings": {"accumulate": 1, "optimizer": "SGD", "clip": 1.0}},
            {"settings": {"accumulate": 2, "optimizer": "Adam", "clip": 2.0}},
            (
                Setting("accumulate", 1, 2, FORWARD),
                Setting("optimizer", "SGD", "Adam", STATE),
                Setting("clip", 1.0, 2.0, STATE),
            ),
        ),
        ({"settings": {"clip": 1.0}}, {}, ()),
        (
            {"settings": {"weight_decay": 0.1, "eps": 1e-8}},
            {"settings": {"weight_decay": 0.2, "eps": 1e-6}},
            (
                Setting("weight_decay", 0.1, 0.2, STATE, num_parameters=4),
                Setting("eps", 1e-8, 1e-6, UPDATE, num_parameters=4),
            ),
        ),
        (
            {"settings": {"momentum": 0.9}},
            {"settings": {"momentum": 0.9, "param_groups": [{"params": ["bias", "other"], "momentum": 0.8}]}},
            (Setting("momentum", 0.9, 0.8, STATE, parameters=("bias",), num_parameters=4),),
        ),
        (
            {"settings": {"param_groups": [{"params": ["bias"], "betas": [0.9, 0.99]}]}},
            {"settings": {"param_groups": [{"params": ["bias", "embed"], "betas": [0.8, 0.99]}]}},
            (Setting("betas", [0.9, 0.99], [0.8, 0.99], STATE, num_parameters=1),),
        ),
    ],
)
def test_settings_that_both_state_are_compared(first: dict, second: dict, expected: tuple, tmp_path: Path) -> None:
    assert differing_settings(run(tmp_path / "a", **first), run(tmp_path / "b", **second)) == expected


EXEMPT = [{"params": ["bias", "block.k_bias"], "weight_decay": 0.0}]


@pytest.mark.parametrize(
    ("framework", "decay", "groups", "expected"),
    [
        pytest.param("jax", 0.1, None, (), id="no groups in another framework"),
        pytest.param("torch", 0.1, None, ("bias", "block.k_bias"), id="no groups in the same one"),
        pytest.param("jax", 0.2, None, (), id="no groups and another decay"),
        pytest.param("jax", 0.1, EXEMPT, (), id="equal groups"),
        pytest.param("jax", 0.1, [{"params": ["bias"], "weight_decay": 0.0}], ("block.k_bias",), id="other groups"),
    ],
)
def test_decay_is_compared_by_parameter(framework, decay, groups, expected, tmp_path):
    a = run(tmp_path / "a", settings={"weight_decay": 0.1, "param_groups": EXEMPT})
    own = {"weight_decay": decay} | ({"param_groups": groups} if groups else {})
    (*found,) = differing_settings(a, run(tmp_path / "b", framework=framework, settings=own))
    assert [(each.name, each.parameters) for each in found] == (
        [("weight_decay", expected)] if expected or decay != 0.1 else []
    )


def test_parameters_without_decay_on_both_sides_are_compared(tmp_path):
    a = run(tmp_path / "a", settings={"weight_decay": 0.1, "param_groups": EXEMPT})
    own = {"weight_decay": 0.1, "param_groups": [{"params": ["bias"], "weight_decay": 0.0}]}
    for settings, exempt in (({"weight_decay": 0.1}, ("bias", "block.k_bias")), ({"weight_decay": 0.0}, ()), (own, ())):
        b = run(tmp_path / str(settings), framework="jax", settings=settings)
        assert exempt_on_one_side(a, b) == exempt_on_one_side(b, a) == exempt
    assert exempt_on_one_side(a, run(tmp_path / "same", settings={"weight_decay": 0.1})) == ()


SINGLE = float(np.float32(0.1))
"""0.1 in float32."""


@pytest.mark.parametrize(
    ("first", "second", "is_one"),
    [
        pytest.param(0.01 / 3, 1 / 300, True, id="another expression"),
        pytest.param(1.0, 1 - 17 * 2.0**-53, False, id="17 roundings"),
        pytest.param(0.1, SINGLE, True, id="held in float32"),
        pytest.param(SINGLE, SINGLE * (1 + 17 * 2.0**-24), False, id="17 roundings of float32"),
        pytest.param(0.1, 0.1 * (1 + 1e-8), False, id="less than a rounding of float32"),
        pytest.param(1, 1.0, True, id="an int"),
    ],
)
def test_settings_equal_up_to_rounding_are_one(first, second, is_one, tmp_path):
    a, b = (
        run(tmp_path / side, learning_rate=float(own), settings={"clip": own, "eps": own, "betas": [own, 0.9]})
        for side, own in (("a", first), ("b", second))
    )
    names = [each.name for each in differing_settings(a, b)]
    assert names == ([] if is_one else ["learning_rate", "clip", "betas", "eps"])


@pytest.mark.parametrize(
    ("x", "y", "is_one"),
    [
        pytest.param(1.0, 1 - 16 * 2.0**-53, True, id="16 roundings"),
        pytest.param(1.0, 1 - 17 * 2.0**-53, False, id="17 roundings"),
        pytest.param(SINGLE, SINGLE * (1 - 15.9 * 2.0**-24), True, id="16 roundings of float32"),
        pytest.param(1.0, 1 - 15.3 * 2.0**-24, False, id="whole numbers are not held in float32"),
        pytest.param(1e300, 1e300 * (1 + 1e-15), True, id="beyond float32"),
        pytest.param(2**60, 2**60 + 1, False, id="ints"),
        pytest.param(2**60 + 1, 2.0**60, True, id="an int and a float"),
        pytest.param([0.9, 0.99], (0.9, 0.99), True, id="a list and a tuple"),
        pytest.param([0.9, 0.99], [0.9], False, id="a shorter list"),
        pytest.param([0.9, 0.99], [0.9, 0.98], False, id="another list"),
        pytest.param([0.9], 0.9, False, id="a list and a number"),
        pytest.param(float("inf"), float("inf"), True, id="infinity"),
        pytest.param("adam", "adam", True, id="texts"),
        pytest.param("adam", 1.0, False, id="a text and a number"),
    ],
)
def test_values_are_one_up_to_sixteen_roundings(x, y, is_one):
    assert _are_one(x, y) is _are_one(y, x) is is_one


def test_a_schedule_starts_alike_whichever_setting_states_its_rate(tmp_path):
    a = run(tmp_path / "a", rates=[[0.1], [0.1]])
    b = run(tmp_path / "b", rates=[[0.1], [0.2]], framework="jax", settings={"lr": SINGLE})
    assert [each.scheduled for each in differing_settings(a, b)] == [True]


@pytest.mark.parametrize("is_exempt", [True, False])
def test_updates_tell_whether_parameters_are_exempt_from_decay(is_exempt, tmp_path, monkeypatch):
    """The second recorder does not see which are."""
    own = faulty.manifest
    exempt = [name for name in faulty.SHAPES if name.startswith("norm") or name.endswith("bias")]
    faults = faulty.Faults(decays=lambda name: name not in exempt)
    groups = [{"params": exempt, "weight_decay": 0.0}]
    a = faulty.record(tmp_path / "a", faults, other={"param_groups": groups})
    monkeypatch.setattr(faulty, "manifest", lambda *args: replace(own(*args), framework="jax"))
    found = compare(a, faulty.record(tmp_path / "b", faults if is_exempt else None, noise=1))
    assert f"the weight decay of {len(exempt)} parameters (first '{exempt[0]}') is not compared" in str(found.notes)
    if is_exempt:
        assert found.verdict is Verdict.ROUNDING and not found.settings
    else:
        assert found.verdict is Verdict.BUG and found.diagnosis and found.diagnosis.signature == "weight_decay"


def run_without_steps(folder: Path, **fields: Any) -> Recording:
    create_recording(folder, made := synthetic.manifest(**fields))
    for rank in range(2):
        RecordingWriter(folder, made, rank).__exit__(KeyboardInterrupt, None, None)
    return Recording.open(folder, partial=True)


NEAR = 16 * 2.0**-24
COSINE = [[float(0.5 * (1 + np.cos(np.pi * step / 20)))] for step in (0, 10, 19)]
COSINE_IN_FLOAT32 = [
    [float(np.float32(0.5) * (1 + np.cos(np.float32(np.pi * step / 20), dtype=np.float32)))] for step in (0, 10, 19)
]


RATES = {"learning_rate": 0.5}, {"learning_rate": 0.25}


@pytest.mark.parametrize(
    ("first", "second", "fields", "expected"),
    [
        ([[0.1], [0.1]], [[0.1], [0.2]], ({}, {}), Setting("learning_rate", 0.1, 0.2, UPDATE, 1, scheduled=True)),
        ([[0.1], [0.1]], [[0.1 * (1 + 0.99 * NEAR)]] * 2, ({}, {}), None),
        (
            [[1.0]],
            [[1 - 1.01 * NEAR]],
            ({}, {}),
            Setting("learning_rate", 1.0, 1 - 1.01 * NEAR, UPDATE, scheduled=True),
        ),
        ([[0.1]], [[0.2]], ({"learning_rate": 0.5}, {}), Setting("learning_rate", 0.1, 0.2, UPDATE)),
        ([[0.1]], [[0.2]], ({"learning_rate": None},) * 2, Setting("learning_rate", 0.1, 0.2, UPDATE)),
        ([[0.1]], [[0.1]], ({"learning_rate": 0.5}, {}), None),
        ([[0.1, 0.2]], [[0.1, 0.3]], ({}, {}), Setting("learning_rate", 0.2, 0.3, UPDATE, scheduled=True)),
        ([[0.1, 0.2]], [[0.1]], ({}, {}), None),
        ([[0.1]], [[0.1, 0.2]], ({}, {}), None),
        pytest.param([[0.1], [0.2]], [[0.1]], ({}, {}), None, id="of one step alone"),
        pytest.param([[0.1]], [[0.1], [0.2]], ({}, {}), None, id="of one step alone, in the other order"),
        pytest.param([[0.1]], [], ({}, {}), None, id="of one side alone"),
        pytest.param([], [[0.1]], ({}, {}), None, id="of one side alone, in the other order"),
        pytest.param([], [[0.1]], RATES, Setting("learning_rate", 0.5, 0.25, UPDATE), id="in settings of both"),
        (COSINE, COSINE_IN_FLOAT32, ({}, {}), None),
        (
            [[1.0], [0.0]],
            [[1.0], [1.01 * NEAR]],
            ({}, {}),
            Setting("learning_rate", 0.0, 1.01 * NEAR, UPDATE, 1, scheduled=True),
        ),
        (
            [[1.0, 0.1]],
            [[1.0, 0.1 * (1 - 1.01 * NEAR)]],
            ({}, {}),
            Setting("learning_rate", 0.1, 0.1 * (1 - 1.01 * NEAR), UPDATE, scheduled=True),
        ),
    ],
)
def test_learning_rates_are_compared_at_each_step(
    first: list, second: list, fields: tuple[dict, dict], expected: Setting | None, tmp_path: Path
) -> None:
    a, b = (
        run(tmp_path / side, rates=rates, **own) for side, rates, own in zip("ab", (first, second), fields, strict=True)
    )
    assert differing_settings(a, b) == (() if expected is None else (expected,))


def test_recordings_are_called_by_framework_then_folder(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a"), run(tmp_path / "b", framework="jax")
    assert labels(a, b) == ("torch", "jax")
    assert labels(a, run(tmp_path / "c")) == ("a", "c")
    same = run(tmp_path / "x" / "a")
    assert labels(a, same) == (str(tmp_path / "a"), str(tmp_path / "x" / "a"))


def test_reasons_against_a_comparison(tmp_path: Path) -> None:
    a = run(tmp_path / "a")
    assert why_incomparable(a, run(tmp_path / "b")) is None
    assert why_incomparable(a, run(tmp_path / "c", 3)) is None
    own = {"settings": {"per_rank_statistics": ["norm1"]}}
    assert why_incomparable(a, run(tmp_path / "d", **own)) is None
    found = why_incomparable(a, run(tmp_path / "e", 3, **own))
    assert found is not None and found.startswith("in e ['norm1'] normalises over the samples of its own rank")
    alone = run(tmp_path / "f", settings={"forward_only": True})
    assert why_incomparable(a, alone) == "f has forward alone, and a is of training"
    assert why_incomparable(alone, a) == "f has forward alone, and a is of training"
    uneven = why_incomparable(run(tmp_path / "g", 4), a)
    assert uneven is not None and uneven.startswith(
        "at step 0 and 2 later steps the ranks of g have [2, 2, 1, 1] samples"
    )
    units = tuple((unit, replace(layout, params=layout.params[1:])) for unit, layout in synthetic.manifest().units)
    names = [param.name for _, layout in units for param in layout.params]
    few = run_without_steps(
        tmp_path / "h", units=units, param_map=identity_map({name: synthetic.SHAPES[name] for name in names})
    )
    expected = ["parameter 'embed' is only in a", "parameter 'block.w' is only in a", "h has no complete step"]
    expected.append(
        "train the same parameters in both runs, or, if only their names differ, pass a map (crossframe map, then --map)"
    )
    assert why_incomparable(a, few) == why_incomparable(few, a) == "; ".join(expected)


@pytest.mark.parametrize(
    ("by", "dtype", "verdict"),
    [
        pytest.param(-200, "bfloat16", Verdict.INCOMPARABLE, id="of another step"),
        pytest.param(5, "float64", Verdict.ROUNDING, id="not known"),
        pytest.param(-200, "float64", Verdict.ROUNDING, id="with the same gradients"),
    ],
)
def test_samples_of_another_step_are_no_rounding(tmp_path, by, dtype, verdict):
    def moved(step, rank, ids):
        return [each + by for each in ids] if step == 2 else ids

    a = faulty.record(tmp_path / "a", dtype=dtype)
    b = faulty.record(tmp_path / "b", faulty.Faults(sample_ids=moved), noise=1, dtype=dtype)
    assert compare(a, b).verdict is verdict and compare(b, a).verdict is verdict


@pytest.mark.parametrize(
    ("by", "phase", "verdict"),
    [
        pytest.param(1.01, PARAMETERS, Verdict.INCOMPARABLE, id="initial values"),
        pytest.param(1.0, STATE, Verdict.INCOMPARABLE, id="state"),
        pytest.param(1.0, REDUCE, Verdict.BUG, id="gradients from equal initial values"),
    ],
)
def test_updates_before_a_recording_explain_what_they_change(tmp_path, by, phase, verdict):
    def started(at, step, rank, name, array):
        return (by if at == PARAMETERS else 1.01) * array if at in (PARAMETERS, phase) else array

    late = synthetic.record(tmp_path / "a", synthetic.manifest(settings={"earlier_updates": 2}), tamper=started)
    found = compare(late, synthetic.record(tmp_path / "b"))
    assert found.verdict is verdict, found.reason
    assert "a begins after 2 stated updates of its parameters and b begins after no stated updates" in str(
        found.settings
    )
    assert compare(late, late).verdict is Verdict.EQUAL
    other = synthetic.record(tmp_path / "c", late.manifest, tamper=lambda *at: 0.99 * started(*at))
    assert compare(late, other).verdict is Verdict.INCOMPARABLE
