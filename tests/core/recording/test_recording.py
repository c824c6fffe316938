"""What is recorded comes back, at any layout and world size."""

import math
from dataclasses import replace

import numpy as np
import pytest

from crossframe.dtypes import numpy_dtype
from crossframe.errors import RecordingError, UsageError
from crossframe.layout import PerParamLayout
from crossframe.param_map import identity_map
from crossframe.params import ParamSpec
from crossframe.recording import Manifest, Recording, RecordingWriter, Schedule, create_recording
from crossframe.recording.progress import Progress
from crossframe.recording.recorded_steps import window_of
from crossframe.trace import Event, summary
from tests.core.helpers import synthetic


@pytest.mark.parametrize("kind", ["flat", "per_param"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_tensors_come_back_bit_for_bit(tmp_path, kind, world_size):
    recording = synthetic.record(tmp_path, synthetic.manifest(world_size, kind=kind))
    for name, shape in synthetic.SHAPES.items():
        first = recording.full("parameters", 0, name)
        assert first.shape == shape
        assert np.array_equal(first, synthetic.initial(name, "float64"))
        step = recording.full("update", 0, name)
        assert np.array_equal(step, first - synthetic.LEARNING_RATE * recording.full("reduce", 0, name))
        local = [recording.local(0, rank, name) for rank in range(world_size)]
        assert local[0].shape == shape
        np.testing.assert_array_equal(np.mean(local, axis=0), recording.full("reduce", 0, name))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_every_dtype_keeps_its_bits(tmp_path, dtype):
    recording = synthetic.record(tmp_path, synthetic.manifest(dtype=dtype))
    array = recording.full("parameters", 0, "block.w")
    assert array.dtype == numpy_dtype(dtype)
    assert array.tobytes() == synthetic.initial("block.w", dtype).tobytes()


def test_replicas_are_read_one_by_one(tmp_path):
    def second_replica_differs(phase, step, rank, name, array):
        return array + 1 if phase == "update" and rank >= 2 else array

    recording = synthetic.record(tmp_path, synthetic.manifest(4, replicate=2), tamper=second_replica_differs)
    first, second = (recording.full("update", 2, "embed", replica=r) for r in range(2))
    np.testing.assert_array_equal(first + 1, second)


def test_lines_come_back(tmp_path):
    recording = synthetic.record(tmp_path)
    assert recording.losses().shape == (3, 2)
    assert recording.losses().dtype == np.float64
    assert np.isfinite(recording.losses()).all()
    assert recording.batch(1, 1).sample_ids == (7, 9, 11)
    assert recording.batch(1, 1).digest == synthetic.digest("[7, 9, 11]")
    assert summary(recording.collectives(0, 1))["reduce_scatter"]["count"] == 2
    assert recording.collectives(1, 0) == []
    assert [unit for unit, _ in recording.layouts()] == ["", "block"]
    assert recording.steps_done() == recording.num_steps == 3


def test_a_loss_that_is_not_finite_comes_back(tmp_path):
    values = iter([math.nan, math.inf, -math.inf] * 2)
    recording = synthetic.record(
        tmp_path, tamper=lambda phase, s, r, n, x: np.array([next(values)]) if phase == "forward" else x
    )
    assert np.array_equal(recording.losses()[:, 0], [math.nan, math.inf, -math.inf], equal_nan=True)


def test_the_schedule_chooses_steps(tmp_path):
    recording = synthetic.record(tmp_path, synthetic.manifest(steps=8, schedule=Schedule(dense=2, every=3)))
    assert recording.recorded_steps() == (0, 1, 3, 6, 7)
    assert recording.has("update", 6, "embed")
    assert not recording.has("update", 5, "embed")
    assert not recording.has("backward", 3, "embed")


@pytest.mark.parametrize(("stated", "recorded", "num"), [({}, 1, 1), ({}, 3, 3), ({"accumulate": 4}, 1, 4)])
def test_microbatches_are_stated_or_recorded(tmp_path, stated, recorded, num):
    made = synthetic.manifest(1, settings=stated)
    create_recording(tmp_path, made)
    with RecordingWriter(tmp_path, made, 0) as writer:
        for microbatch in range(recorded):
            writer.activation(0, microbatch, "block", "output", np.ones((2, 3)))
        writer.updated(0, "", {"embed": (0, 12, np.ones(12))})
        for step in range(3):
            writer.batch(step, synthetic.digest(""), [0])
            writer.loss(step, 0.5)
            writer.end_step(step)
    assert Recording.open(tmp_path).num_microbatches == num


@pytest.mark.parametrize(("most", "world_size", "kept"), [(64, 1, 64), (1, 2, 6)])
def test_files_and_ranges_of_last_steps_are_kept(tmp_path, monkeypatch, most, world_size, kept):
    """64 files, or those of three steps; what steps of equal structure share is one object."""
    steps = kept // world_size + 2
    if most != 64:
        monkeypatch.setattr("crossframe.recording.reader._OPEN_FILES", most)
    recording = synthetic.record(
        tmp_path, synthetic.manifest(world_size, steps=steps, schedule=Schedule(dense=1, every=1))
    )
    values = [recording.full("update", step, "embed") for step in range(steps)]
    assert list(recording._files) == [(rank, step) for step in range(2, steps) for rank in range(world_size)]
    assert list(recording._ranges) == list(range(steps - 4, steps)) and len(recording._kinds) == 2
    assert np.array_equal(recording.full("update", 0, "embed"), values[0])


def test_a_view_of_other_steps_has_its_own_microbatches(tmp_path):
    """As when a recording is followed while it is written."""
    made = synthetic.manifest(1, schedule=Schedule(dense=3, every=1))
    create_recording(tmp_path, made)
    with RecordingWriter(tmp_path, made, 0) as writer:
        for step in range(3):
            for microbatch in range(3 if step == 1 else 0):
                writer.activation(step, microbatch, "block", "output", np.ones((2, 3)))
            writer.batch(step, synthetic.digest(""), [0])
            writer.loss(step, 0.5)
            writer.updated(step, "", {"embed": (0, 12, np.ones(12))})
            writer.end_step(step)
    whole = Recording.open(tmp_path)
    assert whole.num_microbatches == 3
    first = whole.first(1)
    assert (first.num_microbatches, first.first_step_with_activations) == (1, None)
    assert set(first.backward_order) == set(made.params)
    assert first.with_num_steps(3).num_microbatches == 3


def test_backward_reverses_units_and_parameters(tmp_path):
    recording = synthetic.record(tmp_path)
    assert recording.backward_order == ["block.k_bias", "block.w", "bias", "embed"]
    assert Recording.open(tmp_path).with_num_steps(0).backward_order == recording.backward_order


def test_backward_begins_with_root_modules_after_the_units(tmp_path):
    units = {"": ("embed.w", "norm.w", "head.w", "head.b"), "block": ("block.b.w", "block.a.w")}
    layouts = {unit: PerParamLayout(tuple(ParamSpec(name, (2,)) for name in names), 1) for unit, names in units.items()}
    names = [name for each in units.values() for name in each]
    made = synthetic.manifest(1, steps=1, units=tuple(layouts.items()), param_map=identity_map(names))
    create_recording(tmp_path, made)
    with RecordingWriter(tmp_path, made, 0) as writer:
        writer.batch(0, synthetic.digest(""), [0])
        writer.loss(0, 0.5)
        for module in ("embed", "block.a", "block.b", "block", "norm", "head", ""):
            writer.activation(0, 0, module, "output", np.ones(2))
        for unit, layout in layouts.items():
            writer.updated(0, unit, {spec.name: (0, 2, np.ones(2, np.float32)) for spec in layout.params})
        writer.end_step(0)
    # Of the block, whose modules forward calls, the last one that it calls is first.
    expected = ["head.b", "head.w", "norm.w", "block.b.w", "block.a.w", "embed.w"]
    assert Recording.open(tmp_path).backward_order == expected


def test_the_manifest_comes_back(tmp_path):
    made = synthetic.manifest(3, kind="per_param", settings={"note": [1, {"a": None}]})
    create_recording(tmp_path, made)
    assert Manifest.read(tmp_path) == made


def test_progress_while_it_is_written(tmp_path):
    made = synthetic.manifest(1, steps=2)
    create_recording(tmp_path, made)
    watching = Recording.open(tmp_path, partial=True)
    assert watching.steps_done() == 0
    with RecordingWriter(tmp_path, made, 0) as writer:
        for step in range(2):
            writer.batch(step, synthetic.digest(""), [])
            writer.loss(step, 1.0)
            assert watching.steps_done() == step
            writer.end_step(step)
            assert watching.steps_done() == step + 1
    assert watching.steps_done() == 2
    assert Recording.open(tmp_path).steps_done() == 2


def test_progress_counts_a_line_when_it_is_whole(tmp_path):
    synthetic.write_run(tmp_path, synthetic.manifest(1))
    events = tmp_path / "rank00000" / "events.jsonl"
    text, mark = events.read_bytes(), b'{"event": "step", "step": 1,'
    at = text.index(mark) + len(mark) // 2
    events.write_bytes(text[:at])
    watching = Recording.open(tmp_path, partial=True)
    assert watching.steps_done() == 1
    events.write_bytes(text)
    assert watching.steps_done() == 3


def test_a_killed_run_leaves_its_whole_steps(tmp_path):
    synthetic.write_run(tmp_path, synthetic.manifest(), stop_before=2)
    with pytest.raises(
        RecordingError,
        match=r"cut off: ranks 0 \(last step 1\) and 1 \(last step 1\) have no end, and 2 of 3 steps are whole",
    ):
        Recording.open(tmp_path)
    recording = Recording.open(tmp_path, partial=True)
    assert recording.num_steps == recording.steps_done() == 2
    assert recording.losses().shape == (2, 2)
    assert recording.recorded_steps() == (0, 1)
    assert recording.full("update", 1, "embed").shape == (4, 3)


def test_eight_unfinished_ranks_are_named_with_their_last_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "SAMPLES", 12)
    synthetic.write_run(tmp_path, synthetic.manifest(12))
    for rank in range(1, 12):
        events = tmp_path / f"rank{rank:05d}" / "events.jsonl"
        events.write_bytes(events.read_bytes().split(b'{"event": "step", "step": %d,' % (rank % 3))[0])
    with pytest.raises(RecordingError, match="0 of 3 steps are whole") as raised:
        Recording.open(tmp_path)
    named = [f"{rank} ({f'last step {rank % 3 - 1}' if rank % 3 else 'no step'})" for rank in range(1, 9)]
    assert f"ranks {', '.join(named)} and 3 more have no end" in str(raised.value)


def test_a_line_cut_in_two_is_left_out(tmp_path):
    synthetic.write_run(tmp_path, synthetic.manifest())
    events = tmp_path / "rank00001" / "events.jsonl"
    whole = events.read_bytes().split(b'{"event": "step", "step": 1,')[0]
    events.write_bytes(whole + b'{"event": "st')
    with pytest.raises(RecordingError, match=r"rank 1 \(last step 0\) has no end, and 1 of 3 steps"):
        Recording.open(tmp_path)
    recording = Recording.open(tmp_path, partial=True)
    assert recording.num_steps == recording.steps_done() == 1
    with pytest.raises(RecordingError, match="expected a step from 0 to 0, got 1"):
        recording.batch(1, 0)


def test_arrays_are_copied_when_recorded(tmp_path):
    made = synthetic.manifest(1, steps=1)
    create_recording(tmp_path, made)
    array = np.zeros(12)
    with RecordingWriter(tmp_path, made, 0) as writer:
        writer.batch(0, synthetic.digest(""), [0])
        writer.loss(0, 0.0)
        writer.updated(0, "", {"embed": (0, 12, array)})
        array += 1
        writer.end_step(0)
    assert not Recording.open(tmp_path).full("update", 0, "embed").any()


def test_overwrite_replaces_a_recording_and_nothing_else(tmp_path):
    synthetic.write_run(tmp_path, synthetic.manifest(3))
    (tmp_path / "notes.txt").write_text("mine")
    made = replace(synthetic.manifest(), model="other")
    with pytest.raises(RecordingError, match=r"holds a recording already.*overwrite=True"):
        create_recording(tmp_path, made)
    create_recording(tmp_path, made, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "notes.txt"]
    assert Manifest.read(tmp_path).model == "other"


def test_what_an_interrupted_beginning_leaves_can_be_overwritten(tmp_path):
    made = synthetic.manifest()
    synthetic.write_run(tmp_path / "a", made)
    (tmp_path / "a" / "manifest.json").rename(tmp_path / "a" / "manifest.json.part")
    with pytest.raises(RecordingError, match="--overwrite"):
        create_recording(tmp_path / "a", made)
    create_recording(tmp_path / "a", made, overwrite=True)
    assert not list((tmp_path / "a").glob("rank*"))
    assert Manifest.read(tmp_path / "a") == made


def test_progress_begins_anew_with_a_new_recording_in_the_same_place(tmp_path):
    made = synthetic.manifest()
    progress = Progress(tmp_path / "a", made.world_size)
    assert progress.steps_done() == 0
    synthetic.write_run(tmp_path / "a", made)
    assert progress.steps_done() == made.steps
    create_recording(tmp_path / "a", made, overwrite=True)
    assert progress.steps_done() == 0


def test_progress_reads_another_file_in_the_same_place_from_its_beginning(tmp_path):
    events, step = tmp_path / "rank00000" / "events.jsonl", '{"event": "step", "step": 0}\n'
    events.parent.mkdir()
    events.write_text(step * 3)
    progress = Progress(tmp_path, 1)
    assert progress.steps_done() == progress.steps_done() == 3
    events.rename(tmp_path / "earlier")  # which stays, so that the new file has another inode
    events.write_text(step)
    assert progress.steps_done() == 1
    events.write_text(step * 4 + step[:20])
    assert progress.steps_done() == progress.steps_done() == 4


def test_no_progress_is_shown_where_no_file_can_be(tmp_path):
    assert Progress(tmp_path / ("a" * 300), 1).steps_done() == 0


@pytest.mark.parametrize("text", ["5", "5:5", "7:5", "a:b", "-1:4", ""])
def test_a_window_that_is_none_is_refused(text):
    with pytest.raises(UsageError, match=f"as in 500:510, got '{text}'"):
        window_of(text)


@pytest.mark.parametrize(("num", "repeated"), [(4, 4), (5, 0)])
def test_four_structures_of_steps_are_remembered(tmp_path, num, repeated):
    made = synthetic.manifest(1, steps=2 * num)
    create_recording(tmp_path, made)
    event = Event("all_gather", "", "forward", "float64", 8, (0,))
    with RecordingWriter(tmp_path, made, 0) as writer:
        for step in range(2 * num):
            writer.batch(step, synthetic.digest(""), [])
            writer.loss(step, 1.0)
            writer.collectives(step, [event] * (1 + step % num))
            writer.end_step(step)
    assert (tmp_path / "rank00000" / "events.jsonl").read_text().count('"as": ') == repeated
    recording = Recording.open(tmp_path)
    assert [len(recording.collectives(step, 0)) for step in range(2 * num)] == [*range(1, num + 1)] * 2


@pytest.mark.parametrize("rate", [None, 0.0, 0.5])
def test_a_learning_rate_may_be_zero_or_unknown(tmp_path, rate):
    made = synthetic.manifest(learning_rate=rate)
    create_recording(tmp_path, made)
    assert Manifest.read(tmp_path).learning_rate == rate
