"""Activations of two implementations that have one name but are not the same value."""

# pyright: reportOptionalMemberAccess=false
import numpy as np
import pytest

from crossframe.recording import Schedule
from crossframe.verdict import Verdict, compare
from tests.core.helpers import synthetic
from tests.core.helpers.synthetic import OTHER_LOSS, both, only


def unlike(array):
    """Values that are unrelated to those of the array, and as large."""
    return np.random.default_rng(array.size).permutation(array.reshape(-1)).reshape(array.shape) + 1


def always(phase, name, change):
    """A change at all steps."""
    return lambda at, step, rank, what, array: change(array) if (at, what) == (phase, name) else array


HEAD = always("output", "", unlike)


def jax(path, tamper):
    return synthetic.record(path, synthetic.manifest(framework="jax"), tamper=tamper)


def test_an_output_without_consequences_is_left_out_with_a_note(tmp_path):
    a = synthetic.record(tmp_path / "a")
    found = compare(a, jax(tmp_path / "b", HEAD))
    assert found.verdict is Verdict.EQUAL and found.first_divergence is None
    assert any(
        "output of the model are not compared: they differ while losses and gradients agree" in note
        for note in found.notes
    )


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        pytest.param(only("output", "block", lambda array: array + 1), (0, "output", "block"), id="in a module"),
        pytest.param(only("reduce", "block.w", lambda array: 1.5 * array), (0, "", ""), id="in a gradient"),
        pytest.param(only("forward", "", lambda loss: 2 * loss, step=1), (1, "loss", ""), id="at a later step"),
    ],
)
def test_faults_are_located_beside_such_an_output(tmp_path, fault, expected):
    step, event, module = expected
    if step == 0:
        fault = both(fault, OTHER_LOSS)
    a = synthetic.record(tmp_path / "a")
    where = compare(a, jax(tmp_path / "b", both(HEAD, fault))).first_divergence
    assert where is not None and where.step == step
    if event:
        assert (where.event, where.module or "") == (event, module)


def test_one_implementation_has_no_such_values(tmp_path):
    a, b = synthetic.record(tmp_path / "a"), synthetic.record(tmp_path / "b", tamper=HEAD)
    found = compare(a, b)
    assert found.verdict is Verdict.BUG and found.first_divergence.event == "output"


def test_values_that_agreed_before_are_the_same_values(tmp_path):
    a, b = (
        synthetic.record(
            tmp_path / name, synthetic.manifest(framework=name, schedule=Schedule(dense=2, every=1)), tamper=tamper
        )
        for name, tamper in (("torch", None), ("jax", only("output", "", unlike, step=1)))
    )
    found = compare(a, b)
    assert found.verdict is Verdict.BUG and found.first_divergence.step == 1
