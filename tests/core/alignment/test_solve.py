"""Orders of rows, slices along axes, and loops, from which rearrangements are found."""

import numpy as np
import pytest

from crossframe.alignment.modules import _forms
from crossframe.alignment.slices import axis_sets, axis_signatures
from crossframe.alignment.solve import digits_of, rearrangements, row_order, same_bits, solve


@pytest.mark.parametrize(
    ("rows", "slices", "order"),
    [
        pytest.param([5, 7, 5, 9], [5, 5, 9, 7], [0, 2, 3, 1], id="equal rows in order"),
        pytest.param([9, 7, 5], [5, 9], [2, 0], id="fewer slices"),
        pytest.param([5, 7, 9], [5, 8, 9], None, id="no row between others"),
        pytest.param([5, 7, 9], [5, 7, 10], None, id="no row after others"),
        pytest.param([5, 5, 9], [5, 5, 5], None, id="too few equal rows"),
    ],
)
def test_rows_are_ordered_by_equal_signatures(rows, slices, order):
    found = row_order(np.array(rows, np.uint64), np.array(slices, np.uint64))
    assert (None if found is None else found.tolist()) == order


def reversed_bits(count):
    """The numbers below 2**count, with the bits of each in the opposite order: one loop for each bit."""
    return np.arange(2**count).reshape([2] * count).transpose().reshape(-1)


@pytest.mark.parametrize(
    ("index", "digits"),
    [
        pytest.param([0], [], id="one element"),
        pytest.param([0, 1, 2, 3, 4, 5], [(6, 1)], id="in order"),
        pytest.param([0, 2, 4, 1, 3, 5], [(2, 1), (3, 2)], id="two loops"),
        pytest.param([0, 1, 4, 5, 2, 3, 6, 7], [(2, 2), (2, 4), (2, 1)], id="three loops"),
        pytest.param(reversed_bits(4), [(2, 1), (2, 2), (2, 4), (2, 8)], id="four loops"),
        pytest.param(reversed_bits(5), None, id="five loops"),
        pytest.param([0, 1, 2, 4, 3, 5], None, id="no loops"),
        pytest.param([0, 1, 3, 2], None, id="another stride"),
    ],
)
def test_indices_of_few_loops_are_known_by_them(index, digits):
    assert digits_of(np.asarray(index)) == digits


def test_sets_of_axes_have_as_many_slices():
    shape = (2, 3, 1, 4, 6)
    expected = {2: [(0,)], 6: [(4,), (0, 1)], 12: [(0, 4), (1, 3)], 24: [(3, 4), (0, 1, 3)], 144: [(0, 1, 3, 4)], 5: []}
    assert {size: list(axis_sets(shape, size)) for size in expected} == expected


def test_signatures_are_sums_over_the_other_axes():
    hashes = np.arange(12, dtype=np.uint64).reshape(2, 2, 3)
    for axes, signatures in (
        ((0,), [15, 51]),
        ((2,), [18, 22, 26]),
        ((0, 1), [3, 12, 21, 30]),
        ((), [66]),
        ((0, 1, 2), list(range(12))),
    ):
        assert axis_signatures(hashes, axes).tolist() == signatures
    assert axis_signatures(np.full((2, 1), 2**63, np.uint64), ()).tolist() == [0]


@pytest.mark.parametrize(
    ("first", "second", "orders"),
    [
        ((2, 3), (3, 2), [[[0, 2, 4], [1, 3, 5]]]),
        ((6,), (2, 3), [[0, 1, 2, 3, 4, 5], [0, 3, 1, 4, 2, 5]]),
        ((3, 2), (6,), [[[0, 1], [2, 3], [4, 5]], [[0, 3], [1, 4], [2, 5]]]),
        ((2, 1), (1, 2), [[[0], [1]]]),
        ((2, 2), (2, 2), [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]),
        ((4,), (6,), []),
    ],
)
def test_shapes_have_these_rearrangements(first, second, orders):
    numbers = np.arange(np.prod(second)).reshape(second)
    assert sorted(form(numbers).tolist() for form in rearrangements(first, second)) == orders


def test_shapes_without_elements_have_one_rearrangement():
    assert [each.text for each in rearrangements((0, 2), (0, 2))] == ["a b -> a b"]
    assert list(rearrangements((0, 2), (2, 0))) == list(rearrangements((2,), (0, 2))) == []


def test_at_most_64_rearrangements_are_tried():
    found = _forms((2,) * 5, (2,) * 5)  # of 120
    assert len(found) == 64 and found[0].is_identity
    assert len(_forms((2,) * 4, (2,) * 4)) == 24


def test_bits_are_equal_up_to_signs_of_zeros():
    zeros = np.zeros(3)
    assert same_bits(zeros, -zeros) and not same_bits(zeros, zeros[:2]) and not same_bits(zeros, zeros + 1e-300)
    assert solve(np.zeros((0, 2)), np.zeros((2, 0))) is None
