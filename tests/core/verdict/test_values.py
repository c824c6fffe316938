"""Values that are read from one recording: elements, sketches, and means over replicas."""

from dataclasses import replace

import numpy as np
import pytest

from crossframe.recording import Recording, RecordingWriter
from crossframe.recording.event_format import BACKWARD, REDUCE
from crossframe.recording.sketch import WHOLE, sketches_of
from crossframe.verdict.measure.values import (
    Side,
    _mean,
    assemble,
    local_gradients,
    match_values,
    rank_values,
)
from tests.core.helpers import synthetic

NAMES = frozenset(synthetic.SHAPES)


def test_means_are_summed_in_float64():
    values = (2.0**25, 2.0, 2.0, 0.0)  # in float32, 2**25 + 2 is 2**25
    mean = _mean([Side(np.array([value], np.float32)) for value in values]).elements
    assert mean is not None and mean.dtype == np.float32 and mean.tolist() == [2.0**23 + 1]


def test_means_of_sketches_are_means_of_their_sums():
    a, b = np.arange(600.0), 2 * np.arange(600.0)
    sketches = [
        replace(sketch, fingerprint=own, num_not_finite=lost)
        for sketch, own, lost in zip(sketches_of([a, b]), (2**64 - 1, 3), (1, 4), strict=True)
    ]
    mean = _mean([Side(None, each) for each in sketches]).sketch
    assert mean is not None and (mean.fingerprint, mean.num_not_finite) == (2, 5)
    assert np.array_equal(mean.sums, 1.5 * sketches[0].sums)
    assert mean.squares == np.square(1.5 * sketches[0].sums).sum()
    one = _mean([Side(None, sketches[0]), Side(b)])  # elements next to a sketch
    assert one.elements is None and one.sketch is not None and np.array_equal(one.sketch.sums, mean.sums)


def test_sides_count_elements_that_are_not_finite():
    array = np.array([np.nan, np.inf, 3.0, 4.0])
    for side in (Side(array), Side(None, sketches_of([array])[0])):
        assert (side.norm, side.num_not_finite) == (5.0, 2)


def test_bits_are_compared_also_with_a_sketch():
    arrays = np.array([0.0, 1.0]), np.array([-0.0, 1.0])
    sides = [[Side(array), Side(None, sketches_of([array])[0])] for array in arrays]
    for x in sides[0]:
        assert all(x.has_bits_of(y) and y.has_bits_of(x) for y in sides[0])
        assert not any(x.has_bits_of(y) or y.has_bits_of(x) for y in sides[1])


@pytest.mark.parametrize(
    ("numel", "by_sketch", "sketched"),
    [(WHOLE, True, False), (WHOLE + 1, True, True), (WHOLE + 1, False, False)],
)
def test_large_tensors_are_compared_by_sketch_if_asked(numel, by_sketch, sketched):
    a, b = np.arange(float(numel)), np.ones(numel)
    first, second, sketches = match_values(Side(a), Side(b), by_sketch=by_sketch)
    assert (sketches is not None) is sketched
    expected = [each.sums for each in sketches_of([a, b])] if sketched else [a, b]
    assert np.array_equal(first, expected[0]) and np.array_equal(second, expected[1])


@pytest.mark.parametrize("side", [0, 1])
def test_elements_are_sketched_as_the_other_side_is(side):
    array = np.arange(40.0)
    fewer = sketches_of([array], seed="w")[0].folded(8)
    sides = [Side(array), Side(array)]
    sides[side] = Side(None, fewer)
    a, b, sketches = match_values(*sides, by_sketch=False)
    assert sketches is not None and sketches[0].equals(sketches[1]) and sketches[0].seed == "w"
    assert a.shape == b.shape == (8,) and np.array_equal(a, b) and np.array_equal(a, fewer.sums)


def test_gradients_that_were_not_recorded_are_zeros(tmp_path, monkeypatch):
    for write in ("reduced_grads", "local_grads"):
        monkeypatch.setattr(RecordingWriter, write, lambda *args: None)
    run = synthetic.record(tmp_path / "run", synthetic.manifest(dtype="float32"))
    for side in (assemble(run, REDUCE, 0, "embed"), rank_values(run, BACKWARD, 0, 1, "embed")):
        assert side.elements is not None and side.elements.dtype == np.float32
        assert np.array_equal(side.elements, np.zeros((4, 3)))


def replicas(folder, tamper=None, **fields) -> Recording:
    return synthetic.record(folder, synthetic.manifest(2, replicate=2, **fields), tamper=tamper)


def apart(phase, names, change, *, steps=range(3)):
    """A change of these tensors on the second replica."""
    return lambda at, step, rank, name, array: (
        change(array) if at == phase and rank == 1 and step in steps and name in names else array
    )


def doubled(names):
    return apart(REDUCE, names, lambda grad: 2 * grad)


def no_update(phase, step, rank, name, array):
    return synthetic.initial(name, "float64") if phase == "update" else array


def zero_gradient(phase, step, rank, name, array):
    return 0 * array if phase == REDUCE and name == "block.k_bias" else array


MOST = ("embed", "bias", "block.w")


@pytest.mark.parametrize(
    ("tamper", "found"),
    [
        pytest.param(doubled(MOST), NAMES, id="most differ"),
        pytest.param(doubled(MOST[:2]), (), id="half differ"),
        pytest.param(synthetic.both(doubled(MOST[:2]), zero_gradient), NAMES, id="zeros do not count"),
        pytest.param(apart(REDUCE, MOST, lambda grad: grad * (1 + 1e-13)), (), id="rounding"),
        pytest.param(
            synthetic.both(doubled(MOST), apart("update", ["bias"], lambda x: x * (1 + 2**-52), steps=[2])),
            NAMES - {"bias"},
            id="an update differs in its last bit",
        ),
        pytest.param(synthetic.both(doubled(MOST), no_update), (), id="nothing is updated"),
    ],
)
def test_optimizers_that_reduce_are_known_by_replicas(tmp_path, tamper, found):
    run = replicas(tmp_path / "run", tamper)
    assert local_gradients(run) == frozenset(found)
    own = [run.full(REDUCE, 1, "embed", replica=i) for i in (0, 1)]
    value = assemble(run, REDUCE, 1, "embed").elements
    assert value is not None and np.array_equal(value, (own[0] + own[1]) / 2 if found else own[0])
