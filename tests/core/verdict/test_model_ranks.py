"""Values that the ranks which compute one replica together should share, and do not."""

import numpy as np
import pytest

from crossframe.recording import Recording
from crossframe.recording.event_format import FORWARD, PARAMETERS, REDUCE, STATE, UPDATE, encode, place
from crossframe.verdict import Verdict, compare
from crossframe.verdict.measure.bounds_by_dtype import bounds_for
from tests.core.helpers import faulty, synthetic

OUTPUT = ("block", FORWARD, "block", "output")
GRADIENT = ("block", REDUCE, "block.w", "reduced_grad")
BATCH = ("", FORWARD, "", "input")
PARAMETER = ("", PARAMETERS, "embed", "parameter")


def recorded(folder, *disagreements, difference=0.5, tamper=None):
    """A recording in which model ranks differ in these values at step 0."""
    synthetic.write_run(folder, synthetic.manifest(), tamper=tamper)
    return with_lines(folder, disagreements, difference)


def with_lines(folder, disagreements, difference):
    lines = ""
    for unit, phase, name, use in disagreements:
        fields = place(0, 0, phase, use, unit=unit, name=name)
        lines += encode("disagreement", fields | {"difference": difference, "axis": "tp", "ranks": [1, 3]})
    synthetic.edit_events(folder, '{"event": "step", "step": 0', lines + '{"event": "step", "step": 0')
    return Recording.open(folder)


@pytest.mark.parametrize(
    ("disagreements", "where", "said"),
    [
        ([OUTPUT, GRADIENT], (FORWARD, None, "block", "output"), "the output of module 'block'"),
        ([BATCH, GRADIENT], (FORWARD, None, None, "input"), "the batch in"),
        ([GRADIENT], (REDUCE, "block.w", None, "model_ranks"), "the reduced gradient of 'block.w'"),
        ([PARAMETER], (PARAMETERS, "embed", None, "model_ranks"), "'embed'"),
    ],
)
def test_the_first_value_that_differs_is_located(tmp_path, disagreements, where, said):
    right, wrong = recorded(tmp_path / "right"), recorded(tmp_path / "wrong", *disagreements)
    for a, b in ((right, wrong), (wrong, right)):
        found = compare(a, b)
        at = found.first_divergence
        assert found.verdict is Verdict.BUG and at is not None
        assert (at.phase, at.parameter, at.module, at.event, at.ranks, at.step) == (*where, (1, 3), 0)
        assert said in found.reason and "in wrong is not the same on all ranks" in found.reason
        assert "the mesh axis 'tp', ranks 1, 3 differ from the first by 5.0e-01" in found.reason


def test_what_both_runs_have_or_rounding_explains_is_no_bug(tmp_path):
    right = recorded(tmp_path / "right")
    outputs = recorded(tmp_path / "outputs", OUTPUT)  # a program may sum later what a module returns
    rounding = recorded(tmp_path / "rounding", GRADIENT, difference=1e-16)
    both = [recorded(tmp_path / name, GRADIENT) for name in ("a", "b")]
    for pair in ((right, outputs), (right, rounding), both):
        assert compare(*pair).verdict is Verdict.EQUAL


def test_rounding_in_the_other_run_excuses_no_difference(tmp_path):
    right = recorded(tmp_path / "right", GRADIENT, difference=1e-16)
    wrong = recorded(tmp_path / "wrong", GRADIENT)
    for pair in ((right, wrong), (wrong, right)):
        found = compare(*pair)
        assert found.verdict is Verdict.BUG and "'block.w' in wrong is not the same on all ranks" in found.reason


def test_a_value_after_one_within_rounding_is_located(tmp_path):
    right = recorded(tmp_path / "right")
    recorded(tmp_path / "wrong", ("", REDUCE, "embed", "reduced_grad"), difference=1e-16)
    found = compare(right, with_lines(tmp_path / "wrong", [GRADIENT], 0.5))
    assert found.first_divergence is not None and found.first_divergence.parameter == "block.w"


@pytest.mark.parametrize(
    ("phase", "name", "disagreements", "is_before"),
    [
        pytest.param("input", "block", [OUTPUT, GRADIENT], True, id="activation before"),
        pytest.param("output", "block", [OUTPUT, GRADIENT], False, id="same activation"),
        pytest.param("output", "", [OUTPUT, GRADIENT], False, id="activation after"),
        pytest.param("forward", "", [OUTPUT, GRADIENT], False, id="loss"),
        pytest.param("input", "block", [BATCH, GRADIENT], False, id="batch"),
        pytest.param("backward", "block.w", [GRADIENT], True, id="phase before"),
        pytest.param("update", "block.w", [GRADIENT], False, id="phase after"),
    ],
)
def test_of_a_fault_and_a_disagreement_the_earlier_is_located(tmp_path, phase, name, disagreements, is_before):
    right = recorded(tmp_path / "right")
    wrong = recorded(tmp_path / "wrong", *disagreements, tamper=synthetic.only(phase, name, lambda x: 1.5 * x))
    found = compare(right, wrong)
    assert found.verdict is Verdict.BUG and found.first_divergence is not None
    text = "in wrong is not the same on all ranks that compute one replica"
    if is_before:
        assert found.first_divergence.phase == ("forward" if phase == "input" else phase)
        assert text in found.reason.partition("; then, at step 0 the ")[2]
    else:
        assert found.first_divergence.ranks == (1, 3) and found.diagnosis is None
        assert text in found.reason.partition("; from the first of them alone: at step 0 ")[0]


BOUND = bounds_for("float64").parameter


@pytest.mark.parametrize(
    ("phase", "use", "factor"),
    [
        pytest.param(REDUCE, "reduced_grad", 1.0, id="gradient"),
        pytest.param(STATE, "exp_avg", 1.0, id="first moment"),
        pytest.param(STATE, "exp_avg_sq", 2.0, id="second moment"),
    ],
)
def test_each_phase_has_the_bound_of_two_recordings(tmp_path, phase, use, factor):
    where = ("block", phase, "block.up.weight", use)
    right = faulty.record(tmp_path / "right")
    for share, verdict in ((0.9, Verdict.EQUAL), (1.1, Verdict.BUG)):
        faulty.record(tmp_path / f"{share}")
        wrong = with_lines(tmp_path / f"{share}", [where], share * factor * BOUND)
        for pair in ((right, wrong), (wrong, right)):
            found = compare(*pair)
            assert found.verdict is verdict, found.reason
            assert share < 1 or f"(bound {factor * BOUND:.1e})" in found.reason


@pytest.mark.parametrize(
    ("phase", "verdict"),
    [
        (REDUCE, Verdict.EQUAL),
        (STATE, Verdict.EQUAL),
        (UPDATE, Verdict.EQUAL),
        pytest.param(PARAMETERS, Verdict.BUG, id="initial parameters are no sums"),
    ],
)
def test_ranks_may_differ_by_the_rounding_of_cancelled_terms(tmp_path, phase, verdict):
    """A gradient that is small beside those of other parameters is only known up to the rounding of its terms."""

    def small(at, step, rank, name, array):
        return 1e-9 * array if name == "block.w" and at in ("parameters", REDUCE, STATE, UPDATE) else array

    where = ("block", phase, "block.w", "exp_avg" if phase == STATE else "")
    right = recorded(tmp_path / "right", tamper=small)
    found = compare(right, recorded(tmp_path / "wrong", where, difference=1e-7, tamper=small))
    assert found.verdict is verdict, found.reason


@pytest.mark.parametrize(
    ("phase", "name", "use"),
    [
        pytest.param(REDUCE, "block.k_bias", "reduced_grad", id="gradient without a bound"),
        pytest.param(STATE, "block.w", "momentum_buffer", id="entry that no run recorded"),
    ],
)
def test_infinite_differences_between_ranks_are_bugs(tmp_path, phase, name, use):
    right = recorded(tmp_path / "right")
    found = compare(right, recorded(tmp_path / "wrong", ("block", phase, name, use), difference=np.inf))
    assert found.verdict is Verdict.BUG and found.first_divergence is not None
    assert (found.first_divergence.event, found.first_divergence.parameter) == ("model_ranks", name)


def test_gradients_of_zero_have_a_bound_too(tmp_path):
    zero = synthetic.only(REDUCE, "block.w", np.zeros_like)
    right, wrong = recorded(tmp_path / "right", tamper=zero), recorded(tmp_path / "wrong", GRADIENT, tamper=zero)
    assert compare(right, wrong).verdict is Verdict.BUG
