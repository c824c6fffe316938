"""Runs of which a part computes in a narrower dtype, and bounds too coarse to conclude from."""

# pyright: reportOptionalMemberAccess=false
from dataclasses import replace

import numpy as np
import pytest

from crossframe.verdict import Verdict, bounds_for, compare
from crossframe.verdict.measure.narrower_dtypes import NarrowerDtype, narrower_dtype_at
from tests.core.helpers import synthetic
from tests.core.helpers.quantities import quantity

_AFTER = ("output", "forward", "backward", "reduce", "norm", "state", "update")


def _rounds(phase, step, rank, name, array):
    """The output of the block is computed in float32, and all that follows carries its rounding."""
    if (phase, name) == ("output", "block"):
        return array.astype(np.float32).astype(array.dtype)
    return array


def _noisy(phase, step, rank, name, array):
    if phase not in _AFTER or (phase == "output" and name == ""):
        return array
    noise = 1e-7 * np.random.default_rng([step, *phase.encode(), *name.encode()]).normal(size=array.shape)
    moved = array + noise * (synthetic.LEARNING_RATE if phase == "update" else 1.0)
    return moved.astype(np.float32).astype(array.dtype) if phase == "output" else moved


def _factor(phase, name, factor):
    return lambda at, step, rank, what, array: array * factor if (at, what) == (phase, name) else array


def _compared(tmp_path, a, b):
    runs = [synthetic.record(tmp_path / name, synthetic.manifest(), tamper=each) for name, each in (("a", a), ("b", b))]
    return compare(*runs), compare(*runs[::-1])


def test_a_module_in_float32_is_judged_in_float32(tmp_path):
    for found in _compared(tmp_path, _rounds, _noisy):
        assert found.verdict is Verdict.ROUNDING, found.reason
        assert "the output of block is computed in float32, in a run in float64" in found.reason


def _stored(noise):
    """One parameter is stored in float32, and all that follows its gradient carries its rounding."""

    def tamper(phase, step, rank, name, array):
        if step == 0 and phase not in ("backward", "reduce", "norm", "state", "update"):
            return array
        if noise and phase != "batch":
            # Of the kind of roundings, and less than the bound of float32.
            array = array * (
                1 + 3e-8 * np.random.default_rng([step, *phase.encode(), *name.encode()]).random(array.shape)
            )
        return array.astype(np.float32).astype(array.dtype) if name == "block.w" else array

    return tamper


def test_a_parameter_in_float32_is_judged_in_float32(tmp_path):
    for found in _compared(tmp_path, _stored(False), _stored(True)):
        assert found.verdict is Verdict.ROUNDING, found.reason
        assert (
            "the gradient of block.w" in found.reason and "is computed in float32, in a run in float64" in found.reason
        )


def test_noise_of_float32_without_such_a_module_is_a_bug(tmp_path):
    for found in _compared(tmp_path, None, synthetic.jitter(1, 1e-7)):
        assert found.verdict is Verdict.BUG


def test_a_bug_before_or_after_such_a_module_is_found(tmp_path):
    before = synthetic.both(_noisy, _factor("input", "block", 1 + 1e-7))
    after = synthetic.both(_noisy, _factor("reduce", "block.w", 1.1))
    for tamper, phase in ((before, "forward"), (after, "reduce")):
        for found in _compared(tmp_path / phase, _rounds, tamper):
            assert found.verdict is Verdict.BUG and found.first_divergence.phase == phase, found.reason


def test_a_mask_that_differs_is_no_module_in_float32(tmp_path):
    def mask(shift):
        def tamper(phase, step, rank, name, array):
            if (phase, name) != ("output", "block"):
                return array
            return np.roll(np.arange(array.size) % 2, shift).reshape(array.shape).astype(array.dtype)

        return tamper

    for found in _compared(tmp_path, mask(0), mask(1)):
        assert found.verdict is Verdict.BUG and "computed in float32" not in found.reason


@pytest.mark.parametrize(("size", "verdict"), [(1e-6, Verdict.ROUNDING), (2e-3, Verdict.INCONCLUSIVE)])
def test_what_uses_much_of_a_coarse_bound_is_left_open(tmp_path, size, verdict):
    made = synthetic.manifest(dtype="float32")
    a = synthetic.record(tmp_path / "a", made)
    b = synthetic.record(tmp_path / "b", made, tamper=_factor("output", "block", 1 + size))
    found = compare(a, b)
    assert found.verdict is verdict, found.reason
    if verdict is Verdict.INCONCLUSIVE:
        assert "the output of block at step 0 uses" in found.reason and "--perturbed-runs 4" in found.reason


SINGLE = np.array([0.1, 0.2, 0.3, 0.4, 0.7], np.float32).astype(np.float64)
"""Numbers of float32, and of no narrower dtype."""
HALF = 1 + np.arange(1, 6) / 1024
"""Numbers of float16, and not of bfloat16."""


@pytest.mark.parametrize(
    ("made", "narrow"),
    [
        pytest.param([quantity(SINGLE, 2 * SINGLE, phase="backward")], True, id="five elements"),
        pytest.param([quantity(SINGLE[:4], 2 * SINGLE[:4], phase="backward")], True, id="four elements"),
        pytest.param([quantity(SINGLE[:3], 2 * SINGLE[:3], phase="backward")], False, id="three elements"),
        pytest.param([quantity(SINGLE, 2 * SINGLE + 1e-12, phase="backward")], False, id="float64 in b"),
        pytest.param([quantity(SINGLE + 1e-12, 2 * SINGLE, phase="backward")], False, id="float64 in a"),
        pytest.param([quantity(HALF, 2 * HALF, phase="backward")], False, id="float16"),
        pytest.param([quantity(2.0 ** np.arange(20, 25), np.zeros(5), phase="backward")], False, id="bfloat16"),
        pytest.param([quantity(1e300 * SINGLE, SINGLE, phase="backward")], False, id="beyond float32"),
        pytest.param([quantity(SINGLE, 2 * SINGLE, phase="state")], False, id="of the optimizer"),
        pytest.param([quantity(SINGLE, 2 * SINGLE), quantity(SINGLE, SINGLE)], True, id="on one rank"),
        pytest.param([quantity(SINGLE, 2 * SINGLE), quantity(SINGLE, SINGLE + 1e-12)], False, id="not on all ranks"),
    ],
)
def test_float32_shows_in_four_differing_elements(made, narrow):
    found = narrower_dtype_at(made, "float64")
    assert (found is not None) is narrow
    assert narrower_dtype_at(made, "float32") is None


def test_a_narrower_dtype_has_its_first_quantitys_name():
    made = quantity(SINGLE, 2 * SINGLE, parameter="w")
    for fields, name in (
        ({"phase": "backward"}, "gradient of w"),
        ({"phase": "reduce"}, "gradient of w"),
        ({"phase": "update"}, "update of w"),
        ({"phase": "forward", "parameter": "", "use": "output", "module": "h"}, "output of h"),
    ):
        assert narrower_dtype_at([replace(made, **fields)], "float64") == NarrowerDtype(name, "float32", "float64")


def test_bounds_widen_with_the_narrower_dtype():
    found = NarrowerDtype("output of h", "float32", "float64")
    assert found.bounds == bounds_for("float32")
    for bound, wider in ((1e-13, 1e-13 * 2**29), (1e-10, found.bounds.parameter), (np.inf, np.inf), (None, None)):
        assert found.judged(quantity([1.0], [1.0], bound=bound)).bound == wider
