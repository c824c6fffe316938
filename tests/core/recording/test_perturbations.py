"""Hashes of elements, and the values that a perturbed run begins with."""

import ml_dtypes
import numpy as np
import pytest

from crossframe.recording.hashing import element_keys, mix
from crossframe.recording.perturbed_runs import perturbed_values


def test_an_element_has_one_key_wherever_it_lies():
    whole = element_keys("block.w", 0, 100)
    for start, stop in ((0, 1), (3, 50), (99, 100), (40, 40)):
        assert (element_keys("block.w", start, stop) == whole[start:stop]).all()
    assert len(set(whole)) == 100
    assert not set(whole) & set(element_keys("block.k", 0, 100))
    assert not set(whole) & set(element_keys("block.w", 0, 100, "twin 1"))


def test_keys_are_those_of_splitmix64():
    """Its first numbers from seed 0, as its authors' program prints them: recordings of other versions stay comparable."""
    golden = 0x9E3779B97F4A7C15
    states = np.array([(i * golden) % 2**64 for i in (1, 2, 3)], np.uint64)
    assert [hex(key) for key in mix(states)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]


def test_the_bits_of_keys_are_even():
    keys = element_keys("w", 0, 20_000)
    # 20,000 fair coins: five standard deviations are 5 * sqrt(20000) / 2 = 354.
    for bit in range(64):
        ones = int((keys >> np.uint64(bit) & np.uint64(1)).sum())
        assert abs(ones - 10_000) < 354, bit


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16], ids=str)
def test_a_perturbed_run_begins_one_unit_in_the_last_place_away(dtype):
    values = np.random.default_rng(0).normal(size=(30, 7)).astype(dtype)
    values[3] = 0
    values[4] = np.inf
    found = perturbed_values("w", values, 1)
    assert found.dtype == values.dtype and found.shape == values.shape
    assert (found[3:5] == values[3:5]).all()
    rest = np.delete(values, [3, 4], 0), np.delete(found, [3, 4], 0)
    up, down = (np.nextafter(rest[0], dtype(sign * np.inf), dtype=dtype) for sign in (1, -1))
    assert ((rest[1] == up) | (rest[1] == down)).all()
    assert 0.3 < (rest[1] == up).mean() < 0.7
    assert (
        not (perturbed_values("w", values, 2) == found).all() and not (perturbed_values("v", values, 1) == found).all()
    )


@pytest.mark.parametrize("run", [1, 2])
def test_the_first_bit_of_a_key_gives_the_direction(run):
    away = element_keys("w", 3, 11, f"twin {run}") >= np.uint64(2**63)
    for sign in (1, -1):
        expected = np.nextafter(sign * np.ones(8), sign * np.where(away, np.inf, 0.0))
        assert perturbed_values("w", sign * np.ones(8), run, start=3).tolist() == expected.tolist()


def test_a_perturbed_run_is_the_same_in_every_layout_and_perturbed_run_0_is_the_run():
    values = np.random.default_rng(0).normal(size=40)
    found = perturbed_values("w", values, 3)
    assert (
        np.concatenate([perturbed_values("w", values[:11], 3), perturbed_values("w", values[11:], 3, start=11)])
        == found
    ).all()
    assert perturbed_values("w", values, 0) is values
