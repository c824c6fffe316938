"""What a recording does not store twice: bytes that lie in its files already, and lines that steps have alike."""

import json

import numpy as np
import pytest

from crossframe.errors import RecordingError
from crossframe.layout import PerParamLayout
from crossframe.param_map import identity_map
from crossframe.params import ParamSpec
from crossframe.recording import Recording, RecordingWriter, Schedule, create_recording
from crossframe.recording.event_format import STRUCTURE
from crossframe.recording.sketch import sketches_of
from tests.core.helpers import synthetic

NUMEL = 600
STEPS = 3


def values(seed):
    return np.random.default_rng(seed).normal(size=NUMEL)


def write(path, world_size=1, *, detail="full", dense=STEPS, frozen=False):
    """Dense steps in which forward sees what the step before left, and every module's output is the next one's input."""
    layout = PerParamLayout((ParamSpec("w", (NUMEL,), "float64"),), world_size)
    made = synthetic.manifest(
        world_size,
        steps=STEPS,
        schedule=Schedule(dense=dense, every=1),
        units=(("", layout),),
        param_map=identity_map(["w"]),
        detail=detail,
    )
    create_recording(path, made)
    for rank in range(world_size):
        start, stop = rank * NUMEL // world_size, (rank + 1) * NUMEL // world_size
        with RecordingWriter(path, made, rank) as writer:
            for step in range(STEPS):
                writer.batch(step, synthetic.digest(str(step)), [step])
                writer.loss(step, float(step))
                if step == 0:
                    writer.parameters(0, "", {"w": (start, stop, values(0)[start:stop])})
                if writer.is_dense(step):
                    writer.unsharded(step, "", {"w": values(0 if frozen else step)})
                    for module, seed in (("a", 10), ("b", 11)):
                        writer.activation(step, 0, module, "input", values([seed, step]))
                        writer.activation(step, 0, module, "output", values([seed + 1, step]))
                writer.updated(step, "", {"w": (start, stop, values(0 if frozen else step + 1)[start:stop])})
                writer.counts(step, {"w": float(step + 1)})
                writer.end_step(step)
    return Recording.open(path)


def tensor_bytes(path):
    return sum(file.stat().st_size for file in path.glob("rank*/*.safetensors"))


@pytest.mark.parametrize("frozen", [False, True])
def test_equal_bytes_are_stored_once(tmp_path, frozen):
    recording = write(tmp_path, frozen=frozen)
    for step in range(STEPS):
        np.testing.assert_array_equal(recording.unsharded(step, 0, "w"), values(0 if frozen else step))
        np.testing.assert_array_equal(recording.full("update", step, "w"), values(0 if frozen else step + 1))
        for module, use, seed in (("a", "input", 10), ("a", "output", 11), ("b", "input", 11), ("b", "output", 12)):
            np.testing.assert_array_equal(recording.activation(step, 0, 0, module, use), values([seed, step]))
    # Of six tensors a step, three are of three different activations, and one, or none, is of the parameter.
    stored = 1 + 3 * STEPS + (1 if frozen else STEPS)
    assert tensor_bytes(tmp_path) < (stored + 1) * NUMEL * 8


def test_other_dtypes_of_equal_bytes_are_stored_apart(tmp_path):
    made = synthetic.manifest(1, steps=1)
    create_recording(tmp_path, made)
    with RecordingWriter(tmp_path, made, 0) as writer:
        writer.batch(0, synthetic.digest(""), [0])
        writer.loss(0, 0.0)
        writer.activation(0, 0, "a", "input", np.zeros(100))
        writer.activation(0, 0, "a", "output", np.zeros(200, np.float32))
        writer.end_step(0)
    recording = Recording.open(tmp_path, partial=True)
    assert recording.activation(0, 0, 0, "a", "output").dtype == np.float32


@pytest.mark.parametrize("detail", ["full", "sketch"])
def test_lines_of_like_steps_are_written_once(tmp_path, detail):
    recording = write(tmp_path, 2, detail=detail, dense=1)
    found = [json.loads(line) for line in (tmp_path / "rank00001" / "events.jsonl").read_text().splitlines()]
    assert {line["step"] for line in found if line["event"] in STRUCTURE} == {0, 1}
    assert [line.get("as") for line in found if line["event"] == "step"] == [None, None, 1]
    assert recording.recorded_steps() == tuple(range(STEPS))
    assert [recording.count(step, "w") for step in range(STEPS)] == [1.0, 2.0, 3.0]
    for step in range(STEPS):
        whole = sketches_of([values(step + 1)])[0]
        assert recording.has("update", step, "w") and not recording.has("update", STEPS, "w")
        if detail == "sketch":
            assert recording.sketch("update", step, "w").equals(whole)


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ('"as": 1', '"as": 2', "those of an earlier one"),
        ('"as": 1', '"as": -1', "those of an earlier one"),
        ('"as": 1', '"as": "1"', "expected the number of a step as 'as'"),
        ('"counts": 2.0', '"counts": [2.0, 3.0]', "expected 1 counts of optimizer steps, got 2"),
        ('"counts": 2.0', '"counts": {}', "expected counts of optimizer steps"),
        ('"sketch": 0', '"sketch": -1', "expected the row of a sketch"),
        ('"sketch": 0', '"sketch": true', "field 'fingerprint'"),
    ],
)
def test_damaged_references_are_refused(tmp_path, old, new, match):
    write(tmp_path, detail="sketch", dense=1)
    synthetic.edit_events(tmp_path, old, new)
    with pytest.raises(RecordingError, match=match):
        Recording.open(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "detail"),
    [
        ('"at": "', '"at": "x', "full"),
        ('"at": "', '"before": true, "at": "', "full"),
        ('"sketch": 0', '"sketch": 4611686018427387904', "sketch"),
    ],
)
def test_references_to_nothing_are_refused(tmp_path, old, new, detail):
    write(tmp_path, detail=detail)
    synthetic.edit_events(tmp_path, old, new)
    recording = Recording.open(tmp_path)
    with pytest.raises(RecordingError, match=r"step00000\.safetensors|step 0 refers"):
        for at in recording.activations(0):
            (recording.activation if detail == "full" else recording.activation_sketch)(0, 0, *at)
        recording.unsharded(0, 0, "w")
