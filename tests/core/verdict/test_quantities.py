"""Compared quantities: their dtypes, names and norms, and multiplied ones."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from crossframe.recording.sketch import sketches_of
from crossframe.verdict.measure.quantities import _times, finite
from tests.core.helpers.quantities import quantity

TINY = 2.0**-14
"""The smallest normal number of float16."""


@pytest.mark.parametrize(
    ("value", "factor", "dtype"),
    [
        pytest.param(3.0, 0.5, "float16", id="in range"),
        pytest.param(TINY, 1.5, "float16", id="normal"),
        pytest.param(3 * TINY, 1 / 3, "float16", id="smallest normal"),
        pytest.param(3 * TINY, 0.3, "float64", id="rounded below it"),
        pytest.param(-3 * TINY, 0.3, "float64", id="negative"),
        pytest.param(3 * TINY, 0.25, "float16", id="exact below it"),
        pytest.param(6e4, 2.0, "float64", id="overflow"),
        pytest.param(0.0, 2.0, "float16", id="zero"),
        pytest.param(np.inf, 2.0, "float16", id="infinity"),
        pytest.param(np.nan, 2.0, "float16", id="NaN"),
        pytest.param(3 * TINY, 1.0, "float16", id="one"),
    ],
)
def test_products_keep_their_dtype_where_it_has_them(value, factor, dtype):
    array = np.array([1.0, value], np.float16)
    found = _times(array, factor)
    assert found.dtype == dtype
    assert np.array_equal(found, (array.astype(np.float64) * factor).astype(dtype), equal_nan=True)


def test_multiplied_quantities_keep_factors_and_dtypes():
    made = quantity(np.array([1.0, 3 * TINY], np.float16), np.ones(2, np.float32), scale=7.0)
    found = made.times(0.3, 2.0).times(0.5, 1.0)
    assert (found.by, found.scale, found.dtypes) == ((0.15, 2.0), 7.0, ("float16", "float32"))
    assert found.a.tolist() == [float(np.float16(1.0)) * 0.3 * 0.5, 3 * TINY * 0.3 * 0.5]
    assert found.b.tolist() == [2.0, 2.0] and found.b.dtype == np.float32


def test_multiplied_sketches_are_those_of_the_products():
    a, b = sketches_of([np.arange(8.0), np.ones(8)])
    made = quantity(a.sums, b.sums, sketches=(a, b))
    found = made.times(3.0, 1.0).sketches
    assert found is not None and found[1] is b and found[0].fingerprint != a.fingerprint
    expected = sketches_of([3 * np.arange(8.0)])[0]
    assert np.array_equal(found[0].sums, expected.sums) and found[0].squares == expected.squares
    assert (made.sketched, made.numel, made.dtypes) == (True, 8, ("float64", "float64"))
    single = replace(b, dtype="float32")
    assert quantity(a.sums, b.sums, sketches=(a, single)).dtypes == ("float64", "float32")
    assert made.norms == (np.sqrt(140), np.sqrt(8)) and made.typical == pytest.approx(np.sqrt(140 / 8), rel=1e-15)


def test_norms_are_of_finite_elements():
    made = quantity([3.0, np.nan, 4.0, 0.0], np.array([np.inf, 2.0], ml_dtypes.bfloat16))
    assert (made.norms, made.numel, made.typical) == ((5.0, 2.0), 4, 2.5)
    assert quantity([], []).typical == 0.0 and quantity([-3.0], [1.0]).typical == 3.0
    found = finite(np.array([np.nan, -np.inf, 2.0], np.float16))
    assert found.dtype == np.float64 and found.tolist() == [0.0, 0.0, 2.0]
    assert replace(made, scale=2.0).norms == made.with_scale(2.0).norms and made.with_scale(2.0).scale == 2.0


def test_quantities_are_named_by_what_they_are():
    empty = quantity([], [], parameter="")
    names = {
        ("activation", "output of block"): {"module": "block", "use": "output"},
        ("activation", "input of the model"): {"use": "input"},
        ("activation", "output of the model"): {"use": "output"},
        ("buffers", "block.mean"): {"phase": "buffers", "buffer": "block.mean"},
        ("late update", "w"): {"parameter": "w", "late": True},
        ("update", "w"): {"parameter": "w"},
        ("state", "exp_avg of w"): {"phase": "state", "parameter": "w", "use": "exp_avg"},
    }
    for expected, fields in names.items():
        found = replace(empty, **fields)
        assert (found.kind, found.name) == expected
