"""Sketches: what ranks add up is what the whole has; distances are within the bound that is stated."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from crossframe.layout import FlatLayout, PerParamLayout, RaggedLayout
from crossframe.params import ParamSpec
from crossframe.recording.hashing import element_hashes
from crossframe.recording.sketch import NUM_SUMS, Sketch, sketches_of


def sketch(values, name="", start=0):
    return sketches_of([values], start, seed=name)[0]


@pytest.mark.parametrize("kind", [FlatLayout, PerParamLayout, RaggedLayout])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_what_ranks_add_up_is_the_whole_in_any_layout(kind, world_size):
    params = (ParamSpec("a", (7, 5)), ParamSpec("b", (11,)), ParamSpec("c", (3, 4)))
    generator = np.random.default_rng(world_size)
    values = {spec.name: generator.normal(size=spec.shape).astype("float32") for spec in params}
    layout = FlatLayout(params, world_size, True) if kind is FlatLayout else kind(params, world_size)
    found = {}
    for rank in range(world_size):
        for piece in layout.pieces(rank):
            for run in piece.runs():
                part = values[piece.name].reshape(-1)[run.param_start : run.param_start + run.numel]
                made = sketch(part, piece.name, run.param_start)
                found[piece.name] = found[piece.name] + made if piece.name in found else made
    for name, array in values.items():
        whole = sketch(array, name)
        assert found[name].equals(whole)
        np.testing.assert_allclose(found[name].sums, whole.sums, rtol=0, atol=whole.resolution)
        assert found[name].norm == pytest.approx(np.linalg.norm(array.astype("float64")), rel=1e-12)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16], ids=str)
def test_any_other_bit_place_or_name_is_another_fingerprint(dtype):
    values = np.random.default_rng(0).normal(size=50).astype(dtype)
    right = sketch(values)
    assert sketch(values.copy()).equals(right) and sketch(values).distance(right) == 0.0
    for other in (np.nextafter(values, dtype(9), dtype=dtype), values[::-1].copy(), np.roll(values, 1), -values):
        assert not sketch(other).equals(right)
    one = values.copy()
    one[17] = np.nextafter(one[17], dtype(9), dtype=dtype)
    assert not sketch(one).equals(right)
    assert sketch(values, "v").fingerprint != right.fingerprint and not sketch(values, start=1).equals(right)
    zeros = np.zeros(4, dtype)
    assert not sketch(zeros).equals(sketch(-zeros))


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16], ids=str)
def test_nans_of_any_sign_and_payload_are_equal(dtype):
    values = np.random.default_rng(0).normal(size=50).astype(dtype)
    values[[3, 17]] = np.nan
    other = values.copy()
    bits = other.view(f"u{other.dtype.itemsize}")
    bits[3] |= 1 << (8 * other.dtype.itemsize - 1)  # the sign
    bits[17] |= 1
    assert sketch(other).equals(sketch(values)) and np.array_equal(element_hashes(other), element_hashes(values))
    other[4] = np.nan
    assert not sketch(other).equals(sketch(values))


def test_distances_are_right_on_average_and_within_the_stated_deviation():
    """Over 400 names the mean of distance^2 / norm^2 is 1 up to 5 standard errors, and its deviation at most sqrt(2 / NUM_SUMS),
    up to the sampling error of a deviation (5 / sqrt(800) of it)."""
    generator = np.random.default_rng(0)
    shapes = {
        "dense": generator.normal(size=3000),
        "few": np.where(np.arange(3000) % 500 == 0, 1.0, 0.0),
        "steep": 1.0 / np.arange(1, 3001),
        "row": np.where(np.arange(3000) < 60, 2.0, 0.0),
        "column": np.where(np.arange(3000) % 50 == 3, 2.0, 0.0),
    }
    for what, apart in shapes.items():
        a = generator.normal(size=3000)
        ratios = np.array(
            [
                (sketch(a, f"{what} {i}").distance(sketch(a + apart, f"{what} {i}")) / np.linalg.norm(apart)) ** 2
                for i in range(400)
            ]
        )
        bound = np.sqrt(2 / NUM_SUMS)
        assert abs(ratios.mean() - 1) < 5 * bound / np.sqrt(400), what
        assert ratios.std() < bound * (1 + 5 / np.sqrt(800)), what


def test_one_element_is_measured_exactly():
    a = np.random.default_rng(0).normal(size=1000)
    b = a.copy()
    b[123] += 0.5
    assert sketch(a).distance(sketch(b)) == pytest.approx(0.5, rel=1e-12)


def test_what_is_not_finite_is_counted_and_in_no_sum():
    values = np.array([1.0, np.nan, np.inf, 3.0])
    found = sketch(values)
    assert found.num_not_finite == 2 and found.norm == pytest.approx(np.sqrt(10))
    assert np.isfinite(found.sums).all()
    assert not found.equals(sketch(np.array([1.0, np.nan, -np.inf, 3.0])))


def test_a_row_has_all_that_a_sketch_has():
    one = sketches_of([np.array([3.0, np.nan, -np.inf, 4.0])])[0]
    again = Sketch.from_row(one.to_row(), 4, "float64", "")
    assert again.sums.tolist() == one.sums.tolist()
    assert replace(again, sums=one.sums) == one and (one.num_not_finite, one.norm) == (2, 5.0)


def test_several_arrays_at_once_are_as_one_by_one_and_large_ones_as_small():
    generator = np.random.default_rng(0)
    arrays = [generator.normal(size=70_000).astype(dtype) for dtype in ("float32", "float64", "float32")]
    for found, array in zip(sketches_of(arrays, 5), arrays, strict=True):
        assert found.equals(sketch(array, start=5))
        parts = sketch(array[:1000], start=5) + sketch(array[1000:], start=1005)
        assert parts.equals(found)
        np.testing.assert_allclose(parts.sums, found.sums, rtol=0, atol=found.resolution)
