"""Activations that differ in rows from which nothing follows, and faults that look alike."""

import math
from dataclasses import replace

import numpy as np
import pytest

from crossframe.recording.event_format import perturbed_run_folder
from crossframe.recording.sketch import sketches_of
from crossframe.verdict import Verdict, compare
from crossframe.verdict.measure.judge import Judgement, judge
from crossframe.verdict.unused_rows import JudgedStep, differing_share
from tests.core.helpers import synthetic
from tests.core.helpers.quantities import quantity
from tests.core.helpers.synthetic import both, jitter, only


def rows(size, some=slice(2, 3)):
    """Changes rows of the output of 'block' on rank 1."""

    def change(phase, step, rank, name, array):
        if (phase, rank, name) == ("output", 1, "block"):
            array[some] += size
        return array

    return change


def emptied(phase, step, rank, name, array):
    """Makes the last row of the output of 'block' zero."""
    if (phase, name) == ("output", "block"):
        array[2] = 0
    return array


def versus(tmp_path, *tampers, dtype="float64", perturbed=0):
    made = [synthetic.manifest(dtype=dtype, framework=framework) for framework in ("torch", "jax")]
    a = synthetic.record(tmp_path / "a", made[0])
    noise = {"float64": 1e-15, "float32": 1e-7, "bfloat16": 4e-3}[dtype]
    for number in range(1, perturbed + 1):
        synthetic.record(tmp_path / "a" / perturbed_run_folder(number), made[0], tamper=jitter(number, noise))
    return compare(a, synthetic.record(tmp_path / "b", made[1], tamper=synthetic.both(jitter(9, noise), *tampers)))


@pytest.mark.parametrize(("dtype", "perturbed"), [("float64", 0), ("float64", 4), ("float32", 4)])
def test_rows_without_consequence_are_a_note(tmp_path, dtype, perturbed):
    found = versus(tmp_path, rows(1.0), dtype=dtype, perturbed=perturbed)
    assert found.verdict is Verdict.ROUNDING, found.reason
    assert found.first_divergence is None and not any(each.beyond for each in found.judged)
    assert found.notes[0].startswith("values that nothing uses differ")
    assert "the output of block (microbatch 0) on rank 1 by " in found.notes[0]
    assert "in at most 33 % of the rows" in found.notes[0]


@pytest.mark.parametrize(
    "consequence",
    [
        pytest.param(only("forward", "", lambda loss: loss * (1 + 1e-8)), id="loss"),
        pytest.param(only("backward", "embed", lambda grad: grad * (1 + 1e-8)), id="local gradient"),
        pytest.param(only("reduce", "block.w", lambda grad: grad * (1 + 1e-8)), id="reduced gradient"),
        pytest.param(only("update", "bias", lambda value: value + 1e-8), id="parameter"),
        pytest.param(rows(1.0, slice(None)), id="all rows"),
        pytest.param(both(emptied, rows(1.0, slice(0, 2))), id="all rows but one of zeros"),
    ],
)
def test_rows_with_a_consequence_are_a_bug(tmp_path, consequence):
    found = versus(tmp_path, rows(1.0), consequence)
    assert found.verdict is Verdict.BUG
    assert (found.first_divergence.event, found.first_divergence.module) == ("output", "block")
    assert not found.notes


def test_rows_in_another_order_are_not_unused(tmp_path):
    def swapped(phase, step, rank, name, array):
        return array[[1, 0, 2, 3]] if (phase, name) == ("output", "block") else array

    def longer(phase, step, rank, name, array):
        return np.concatenate([array, 2 * array[:1]]) if (phase, name) == ("output", "block") else array

    a = synthetic.record(tmp_path / "a", synthetic.manifest(), tamper=longer)
    b = synthetic.record(tmp_path / "b", synthetic.manifest(), tamper=synthetic.both(longer, swapped))
    assert compare(a, b).verdict is Verdict.BUG


def test_one_row_shows_that_both_sides_compute_the_same(tmp_path):
    """As in a batch that is mostly padding."""
    found = versus(tmp_path, rows(1.0, slice(1, 3)))
    assert found.verdict is Verdict.ROUNDING and "in at most 67 % of the rows" in found.notes[0], found.reason


@pytest.mark.parametrize(("times", "is_aside"), [(0.9, False), (1.1, True)])
def test_a_mean_over_all_rows_would_show_what_is_set_aside(tmp_path, times, is_aside):
    """Of three rows on each of two ranks: the bound of gradients in float64, 1e-11, times six."""
    bound = 6e-11 * times

    def change(phase, step, rank, name, array):
        if (phase, rank, name) == ("output", 1, "block"):
            array[2] += bound * np.linalg.norm(array) / math.sqrt(array.shape[1])
        return array

    a = synthetic.record(tmp_path / "a", synthetic.manifest())
    found = compare(a, synthetic.record(tmp_path / "b", synthetic.manifest(framework="jax"), tamper=change))
    assert (found.verdict is not Verdict.BUG) is is_aside and bool(found.notes) is is_aside, found.reason


def test_coarse_dtypes_set_nothing_aside(tmp_path):
    coarse = versus(tmp_path / "coarse", rows(0.3), dtype="bfloat16", perturbed=4)
    assert coarse.verdict is not Verdict.ROUNDING and coarse.first_divergence.module == "block"
    assert not coarse.notes


ROWS = np.array([[3.0, 0.0], [0.0, 2.0], [2.0, 2.0], [0.0, -4.0]])


def output(a, b, **other):
    """An output of four rows, of which a row differs by more than bound * scale / sqrt(4) = 1."""
    fields = {"phase": "forward", "parameter": "", "module": "h", "use": "output", "scale": 4.0} | other
    return Judgement(quantity(a, b, **fields), False, 1.0, True, False, False)


def moved(*lengths):
    return ROWS + np.array([[length, 0.0] for length in lengths])


@pytest.mark.parametrize(
    ("b", "share"),
    [
        pytest.param(moved(0, 1.01, 0, 0), 0.25, id="one row"),
        pytest.param(moved(1, 1.01, -1, 0), 0.25, id="others within the bound"),
        pytest.param(moved(5, 1.01, 7, 0), 0.75, id="three rows"),
        pytest.param(moved(5, 1.01, 7, 2), None, id="all rows"),
        pytest.param(ROWS[[1, 0, 2, 3]], None, id="exchanged rows"),
        pytest.param(ROWS[[1, 0, 2, 3]] + 0.3, None, id="exchanged rows within the bound"),
        pytest.param(ROWS[[1, 0, 2, 3]] + [[9, 0], [0, 0], [0, 0], [0, 0]], 0.5, id="other rows"),
        pytest.param(-ROWS, None, id="no row"),
    ],
)
def test_the_share_of_rows_that_differ(b, share):
    assert differing_share(output(ROWS, b)) == share
    stacked = (side.reshape(2, 2, 2) for side in (ROWS, b))  # rows are along the last dim
    assert differing_share(output(*stacked)) == share


@pytest.mark.parametrize(("length", "share"), [(1.0, None), (1.01, 0.75)])
def test_rows_within_the_bound_of_zero_show_nothing(length, share):
    a = np.array([[length, 0.0], [0.0, 9.0], [7.0, 0.0], [0.0, 5.0]])
    assert differing_share(output(a, a + np.array([[0.0], [2.0], [3.0], [-9.0]]))) == share


def test_rows_are_only_those_of_whole_finite_activations():
    b, (x, y) = moved(0, 1.01, 0, 0), sketches_of([ROWS, ROWS])
    wrong = [
        output(ROWS, b, phase="reduce", module="", use=""),
        output(ROWS, b, bound=None),
        output(ROWS, b, sketches=(x, y)),
        output(ROWS.reshape(-1), b.reshape(-1)),
        output(ROWS[:0], b[:0]),
        output(ROWS, b[:2]),
    ]
    one_sided, both = b.copy(), ROWS.copy()
    one_sided[0, 0] = both[0, 0] = np.nan
    wrong += [judge(output(*sides).quantity) for sides in ((ROWS, one_sided), (both, one_sided))]
    assert [differing_share(each) for each in wrong] == [None] * len(wrong)


def judged_step(loss=0.01, gradient=0.02, smallest=0.1):
    step = JudgedStep()
    step.add([output(ROWS[:3], ROWS[:3]), output(ROWS[:3].reshape(3, 1, 2), ROWS[:3])])
    if loss:
        losses = [quantity([1.0], [1.0], phase="forward", parameter="", bound=bound) for bound in (loss / 2, loss)]
        step.add([judge(each) for each in losses])
    for phase in ("backward", "reduce", "state"):  # the last one is no gradient
        step.add([judge(quantity([0.0, 4.0], [0.0, 4.0], phase=phase, bound=gradient, scale=3.0))])
    step.add_beyond([replace(output(ROWS, ROWS), difference=each) for each in (smallest, 7.0)])
    step.add_beyond([replace(output(ROWS, ROWS), difference=5.0)])
    return step


@pytest.mark.parametrize(
    ("fields", "visible"),
    [
        # Of gradients, sqrt(2 * (0.02 * 3)^2 / (2 * 4^2)) = 0.015; of six rows, 0.09.
        pytest.param({"smallest": 0.0901}, True, id="above the bound of gradients"),
        pytest.param({"smallest": 0.0899}, False, id="below the bound of gradients"),
        pytest.param({"loss": 0.03, "smallest": 0.1801}, True, id="above the bound of the loss"),
        pytest.param({"loss": 0.03, "smallest": 0.1799}, False, id="below the bound of the loss"),
        pytest.param({"loss": None, "smallest": 4.0}, False, id="no loss"),
        pytest.param({"gradient": math.inf, "smallest": 4.0}, False, id="no bound of gradients"),
    ],
)
def test_differences_show_in_means_over_all_rows(fields, visible):
    assert judged_step(**fields).visible is visible
