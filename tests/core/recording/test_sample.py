"""Samples: what ranks merge is what the whole has, and the order of elements changes neither signatures nor values."""

import ml_dtypes
import numpy as np
import pytest

from crossframe.recording.sample import Sample, merged, num_sampled, sample_of

SIZE = 200_000


def values(dtype=np.float32, size=SIZE):
    return np.random.default_rng(0).normal(size=size).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("cuts", [[], [1, 2, 150_000], list(range(0, SIZE, 12_345))], ids=["one", "few", "many"])
def test_ranks_merge_to_the_elements_nearest_to_zero(dtype, cuts):
    whole = values(dtype)
    whole[1000:1200] = 0
    ends = [*cuts, SIZE]
    parts = [sample_of(whole[start:stop], start) for start, stop in zip([0, *cuts], ends, strict=True)]
    found = merged(parts)
    sizes = np.abs(whole.astype(np.float32))
    wanted = np.flatnonzero((sizes > 0) & (sizes < found.limit))
    assert found.places.tolist() == wanted.tolist()
    assert found.values.tolist() == whole[wanted].astype(np.float32).tolist()
    assert len(wanted) >= num_sampled(SIZE) // 2 and found.signature == sample_of(whole).signature


def test_another_order_has_the_same_elements_and_signature():
    array = values().reshape(400, 500)
    one, other = sample_of(array), sample_of(array.T)
    assert one.signature == other.signature and sorted(one.values) == sorted(other.values)
    wrong = array.copy()
    wrong[3, 3] = np.nextafter(wrong[3, 3], np.float32(9))
    assert sample_of(wrong).signature != one.signature


def test_elements_that_are_zero_or_not_finite_are_left_out():
    found = sample_of(np.array([0.0, np.nan, -np.inf, -0.0, 2.0, -1.0], np.float32))
    assert found.places.tolist() == [4, 5] and found.limit == np.inf and found.least == -1.0
    assert sample_of(np.zeros(9, np.float32)).least == 0.0


def test_a_file_has_eight_bytes_for_each_element():
    one = sample_of(values(), 77)
    items = one.to_items(77)
    assert items.nbytes == 8 * (1 + num_sampled(SIZE))
    again = Sample.from_items(items, 77, 77 + SIZE)
    assert again.places.tolist() == one.places.tolist() and again.values.tolist() == one.values.tolist()
    assert (again.signature, again.limit, again.least) == (one.signature, one.limit, one.least)
    with pytest.raises(ValueError, match="other places"):
        Sample.from_items(items, 77, 177)
    few = sample_of(np.arange(1.0, 4.0), 5).to_items(5)
    assert Sample.from_items(few, 5, 8).places.tolist() == [5, 6, 7]
    with pytest.raises(ValueError, match="other places"):
        Sample.from_items(few, 5, 7)


def test_a_sample_with_too_many_elements_is_refused():
    items = sample_of(np.arange(1.0, 101.0)).to_items(0)
    assert len(items) == 1 + 64 and Sample.from_items(items, 0, 100).limit == 64.0
    with pytest.raises(ValueError, match="expected a sample of elements 0:100, got other places"):
        Sample.from_items(np.append(items, items[-1]), 0, 100)


def test_elements_that_come_late_are_sampled():
    """The first of several chunks has fewer elements that are not zero than a sample."""
    array = np.zeros(100_000, np.float32)
    array[[5, 35_000, 90_000]] = 1.0, -2.0, 3.0
    found = sample_of(array)
    assert (found.places.tolist(), found.values.tolist()) == ([5, 35_000, 90_000], [1.0, -2.0, 3.0])
    assert (found.limit, found.least) == (np.inf, 1.0)


def test_a_sample_has_the_nearer_limit():
    whole = sample_of(np.array([1.0, -2.0, 3.0]))
    near = whole.within(2.0)
    assert (near.places.tolist(), near.limit, near.within(9.0).limit, whole.within(9.0).limit) == ([0], 2.0, 2.0, 9.0)
