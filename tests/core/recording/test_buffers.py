"""Tensors of a model that are no parameters, in recordings."""

import numpy as np
import pytest

from crossframe.errors import RecordingError
from crossframe.recording import Recording, RecordingWriter, Sketch, create_recording
from crossframe.recording.event_format import CHANGED, INITIAL
from tests.core.helpers import synthetic
from tests.core.helpers.synthetic import digest

LARGE = 3000


def buffers(step, rank):
    """A mean that begins to move at the second step, a constant, and one that appears at the second step."""
    values = {"block.mean": np.full((2, 3), max(step, 0) + 10.0 * rank), "mask": np.arange(LARGE, dtype=np.float32)}
    return values | ({"cache": np.ones(4)} if step > 0 else {})


@pytest.mark.parametrize("detail", ["full", "sketch"])
def test_each_rank_has_its_values_before_and_after_each_step(tmp_path, detail):
    recording = synthetic.record(tmp_path / "run", synthetic.manifest(detail=detail), buffers=buffers)
    assert recording.initial_buffers() == ["block.mean", "mask"]
    assert [recording.buffers(step) for step in range(3)] == [[], ["block.mean", "cache"], ["block.mean", "cache"]]
    for rank in range(2):
        for step in (-1, 0, 1, 2):
            assert np.array_equal(recording.buffer(step, rank, "block.mean"), buffers(step, rank)["block.mean"])
            mask = recording.buffer(step, rank, "mask")
            assert (
                mask.numel == LARGE if isinstance(mask, Sketch) else np.array_equal(mask, buffers(step, rank)["mask"])
            )
        assert recording.buffer_shape(2, rank, "block.mean") == (2, 3)
    assert isinstance(recording.buffer(0, 0, "mask"), Sketch) is (detail == "sketch")
    assert recording.has_buffer(1, "cache") and not recording.has_buffer(0, "cache")
    with pytest.raises(RecordingError, match="rank 1 recorded no buffer 'cache' by step 0"):
        recording.buffer(0, 1, "cache")


def test_what_returns_to_its_first_value_is_still_recorded(tmp_path):
    def back_and_forth(step, rank):
        return {"mean": np.full(LARGE, float(step == 1))}

    recording = synthetic.record(tmp_path / "run", buffers=back_and_forth)
    assert [recording.buffers(step) for step in range(3)] == [[], ["mean"], ["mean"]]
    assert np.array_equal(recording.buffer(2, 0, "mean"), np.zeros(LARGE))


def test_a_buffer_that_the_model_drops_is_not_its_first_value(tmp_path):
    def dropped(step, rank):
        return {"mean": np.full(3, float(step))} if step < 2 else {}

    recording = synthetic.record(tmp_path / "run", buffers=dropped)
    assert [recording.has_buffer(step, "mean") for step in (-1, 0, 1, 2)] == [True, True, True, False]


def test_buffers_of_one_rank_are_not_of_all(tmp_path):
    def own(step, rank):
        return {"mean": np.full(3, float(step))} if rank == 1 else {}

    recording = synthetic.record(tmp_path / "run", buffers=own)
    assert (recording.initial_buffers(), recording.buffers(0)) == ([], ["mean"])
    assert not any(recording.has_buffer(step, "mean") for step in (-1, 0, 1, 2))
    assert recording.buffer(1, 1, "mean").tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("detail", ["full", "sketch"])
def test_a_constant_takes_room_once(tmp_path, detail):
    made = synthetic.manifest(detail=detail)
    sizes = []
    for name, values in (("without", None), ("with", lambda step, rank: {"mask": np.arange(100.0 * LARGE)})):
        synthetic.record(tmp_path / name, made, buffers=values)
        files = (tmp_path / name).glob("rank*/step*.safetensors")
        sizes.append(sum(file.stat().st_size for file in files))
    once = 2 * 100 * LARGE * 8 if detail == "full" else 2 * 2100
    assert 0 < sizes[1] - sizes[0] <= once + 1000


@pytest.mark.parametrize(
    ("step", "values", "use", "said"),
    [
        (0, {"mean": (np.zeros(3), (2,))}, CHANGED, r"buffer 'mean': expected 3 elements, got shape \[2\]"),
        (0, {}, "after", "expected buffers after the step, got 'after' ones"),
        (1, {}, INITIAL, "expected buffers after the step, got 'initial' ones"),
        (1, {}, CHANGED, "the schedule records no buffers here"),
    ],
)
def test_invalid_calls_raise(tmp_path, step, values, use, said):
    made = synthetic.manifest(1, schedule=synthetic.Schedule(dense=1, every=10))
    create_recording(tmp_path / "run", made)
    with pytest.raises(RecordingError, match=said), RecordingWriter(tmp_path / "run", made, 0) as writer:
        for done in range(step):
            writer.batch(done, digest(""), [0])
            writer.loss(done, 1.0)
            writer.end_step(done)
        writer.buffers(step, values, use)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"use": "changed", "shape": [2, 3]', '"use": "initial", "shape": [2, 3]', "expected one of .'changed'.,"),
        ('"use": "initial", "shape": [2, 3]', '"use": "initial", "shape": [2, -3]', "expected the shape of a buffer"),
        (
            '"unit": "block", "name": "block.mean"',
            '"unit": "", "name": "block.mean"',
            "of the unit that has 'block.mean'",
        ),
        ('"shape": [2, 3], "dtype": "float64"', '"shape": [2, 3], "dtype": "int8"', "unknown dtype 'int8'"),
        (
            '"unit": "", "name": "cache"',
            '"unit": "block", "name": "block.mean"',
            "buffer 'block.mean' occurs twice in step 1",
        ),
    ],
    ids=["use", "shape", "unit", "dtype", "twice"],
)
def test_damaged_lines_raise(tmp_path, old, new, said):
    synthetic.write_run(tmp_path / "run", synthetic.manifest(), buffers=buffers)
    synthetic.edit_events(tmp_path / "run", old, new)
    with pytest.raises(RecordingError, match=said):
        Recording.open(tmp_path / "run")
