"""What a batch is known by: its values, whatever holds them."""

# pyright: reportArgumentType=false

import ml_dtypes
import numpy as np
import pytest

from crossframe.recording.batches import Batch, batch_of, digest_of, inputs_of, row_ids

TOKENS = np.arange(12).reshape(4, 3)
IMAGES = np.random.default_rng(0).integers(0, 16, size=(4, 2, 2)).astype(np.float64)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_what_holds_the_values_does_not_matter(dtype):
    for other in ([TOKENS.astype(np.int32), IMAGES.astype(dtype)], [IMAGES.astype(dtype), TOKENS.astype(np.uint8)]):
        assert digest_of(other) == digest_of([TOKENS, IMAGES])
        assert row_ids(other) == row_ids([TOKENS, IMAGES])


def test_other_values_shapes_or_places_are_another_batch():
    changed = TOKENS.copy()
    changed[2, 1] += 1
    others = [[changed, IMAGES], [TOKENS], [TOKENS.reshape(2, 6), IMAGES], [TOKENS[::-1], IMAGES], [IMAGES, IMAGES]]
    digests = {digest_of(arrays) for arrays in [[TOKENS, IMAGES], *others]}
    assert len(digests) == 1 + len(others)
    same = [a == b for a, b in zip(row_ids([TOKENS, IMAGES]), row_ids([changed, IMAGES]), strict=True)]
    assert same == [True, True, False, True]


def test_a_sample_has_its_number_wherever_it_is_fed():
    ids = row_ids([TOKENS, IMAGES])
    assert len(set(ids)) == 4 and all(0 <= each < 2**63 for each in ids)
    assert row_ids([TOKENS[1:3], IMAGES[1:3]]) == ids[1:3]
    # What has no row for each sample says nothing of samples.
    assert row_ids([TOKENS, np.float64(3.0), np.ones(7)]) == row_ids([TOKENS])
    assert row_ids([np.float64(3.0)]) == () == row_ids([])


def test_large_arrays_go_piece_by_piece():
    large = np.random.default_rng(1).normal(size=(2, 70_000))
    other = large.copy()
    other[1, -1] += 1e-9
    assert digest_of([large]) == digest_of([large.copy(order="F")]) != digest_of([other])


def test_inputs_do_not_depend_on_microbatches():
    positions = np.arange(3)[None]
    whole = inputs_of([[TOKENS, IMAGES, positions]])
    assert whole == inputs_of([[TOKENS[i : i + 1], IMAGES[i : i + 1], positions] for i in range(4)])
    assert [x == y for x, y in zip(whole[0], inputs_of([[TOKENS[2:]], [TOKENS[:2]]])[0], strict=True)] == [True, False]
    assert inputs_of([[TOKENS], [TOKENS[:1], IMAGES]])[1] == whole[1] and inputs_of([]) == ()


def test_numbers_next_to_samples_are_none_of_them():
    first, second = ([TOKENS, np.float32(numbers)] for numbers in (61, 118))
    assert inputs_of([first]) == inputs_of([second]) == inputs_of([[TOKENS]]) and inputs_of([[np.float32(61)]]) == ()
    one, other = (batch_of([each]) for each in (first, second))
    assert one.digest != other.digest and one.has_samples_of(other)


def test_padding_is_no_part_of_a_sample():
    lengths = np.array([3, 1, 2, 3])
    labels = TOKENS + 100

    def padded(rows, length, *, left=False):
        """Tokens, the mask and labels of some samples."""
        found = [np.full((len(rows), length), value) for value in (7, 0, -1)]
        for i, row in enumerate(rows):
            real = slice(length - lengths[row], length) if left else slice(lengths[row])
            for array, values in zip(found, (TOKENS, np.ones_like(TOKENS), labels), strict=True):
                array[i, real] = values[row, : lengths[row]]
        return found

    whole, ids = padded(range(4), 3), row_ids(padded(range(4), 3), 1)
    for length, left in ((3, True), (5, False), (6, True)):
        assert row_ids(padded(range(4), length, left=left), 1) == ids != row_ids(padded(range(4), length, left=left))
    halves = [padded([0, 1], 4), padded([2, 3], 5)]
    assert inputs_of(halves, [1, 1]) == inputs_of([whole], [1]) != inputs_of(halves)
    whole[0][2, 1] += 1  # a token
    assert [a == b for a, b in zip(row_ids(whole, 1), ids, strict=True)] == [True, True, False, True]
    gaps = [TOKENS, np.array([[1, 0, 1]] * 4)]  # what a model does not see in the middle is no padding
    assert row_ids(gaps, 1) == row_ids(gaps)


def test_rows_are_the_same_if_one_side_does_not_know_the_mask():
    mask = np.array([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]])
    whole, halves = [TOKENS, mask], [[TOKENS[:2], mask[:2]], [TOKENS[2:], mask[2:]]]

    def batch(*microbatches, index=None):
        return batch_of(microbatches, [index] * len(microbatches))

    assert batch(whole).sample_ids != batch(whole, index=1).sample_ids
    assert batch(whole).has_rows_of(batch(whole, index=1)) and batch(*halves, index=1).has_rows_of(batch(*halves))
    assert not batch(*halves).has_rows_of(batch(*halves[::-1]))
    assert not batch(*halves).has_rows_of(batch(*halves[::-1], index=1))


def test_batches_have_the_same_samples_whatever_their_microbatches():
    def batch(*microbatches):
        return batch_of(microbatches)

    whole = batch([TOKENS, IMAGES])
    halves = [[TOKENS[:2], IMAGES[:2]], [TOKENS[2:], IMAGES[2:]]]
    for same in (batch(*halves), batch(*halves[::-1]), batch([TOKENS]), batch([TOKENS[:2]], [TOKENS[2:]])):
        assert whole.has_samples_of(same) and same.has_samples_of(whole)
    others = (
        batch([TOKENS[::-1], IMAGES]),  # samples with the images of others
        batch([TOKENS[::-1]]),
        batch([TOKENS + 1]),
        batch([TOKENS[:2], IMAGES[:2]]),
        batch(*halves, halves[0]),
        Batch("0" * 64, whole.sample_ids),
    )
    for other in others:
        assert not whole.has_samples_of(other) and not other.has_samples_of(whole)


def test_numbers_of_batches_are_those_in_recordings_of_today():
    arrays = [TOKENS, TOKENS / 2]
    assert digest_of(arrays) == "d7d3cd75d8df76aac0b8b01f2c45f5af2362f98be296d1d45dad04ad0ba2a5d6"
    assert digest_of([np.arange(70_000)]) == "6af81ff5a1e025a00bc1c7d56dccb38f4bf9a1e9a41537d719551bbcd688e8b2"
    assert row_ids(arrays) == (7730142404678903207, 4925155752097936831, 4712048184692926904, 2011354254807097343)
    assert inputs_of([[TOKENS]]) == ((378545729781900206, 671522387845812714),)
