"""Files that earlier versions wrote are read as they were meant, and files that were made by other rules are refused by name.

The golden files in `formats` were written by the version whose format they are named after; they are never written again.
"""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from crossframe.checkpoint import MODEL, STATE, CheckpointError, begin, finish, read, write_rank
from crossframe.errors import CrossframeError, RecordingError
from crossframe.layout import FlatLayout, PerParamLayout, RaggedLayout, Sharding, flat
from crossframe.mesh import MeshSpec
from crossframe.recording import Recording, sketch
from crossframe.recording.sketch import sketches_of
from crossframe.verdict import Verdict, compare
from tests.core.helpers import synthetic

FORMATS = Path(__file__).parent / "formats"


def expected_line(layout, rank, bump):
    """Element k of the i-th parameter of a unit is bump + 32 * i + k."""
    line = np.zeros(layout.padded_shard_numel)
    for piece in layout.pieces(rank):
        i = [spec.name for spec in layout.params].index(piece.name)
        for run in piece.runs():
            values = bump + 32 * i + np.arange(run.param_start, run.param_start + run.numel)
            line[run.shard_start : run.shard_start + run.numel] = values
    return line


def test_a_checkpoint_of_format_2_is_read(tmp_path):
    saved = read(FORMATS / "checkpoint_2")
    layouts = [layout for _, layout in saved.sections[MODEL].units]
    assert [type(layout) for layout in layouts] == [FlatLayout, PerParamLayout, RaggedLayout, FlatLayout]
    assert saved.about == {"step": 3} and saved.value("step") == 3 and saved.value("scale").tolist() == [0.5, 2]
    for section, bump in ((MODEL, 0), (STATE, 64)):
        for world_size in (1, 2, 3):
            units = tuple((unit, layout.over(world_size)) for unit, layout in saved.sections[section].units)
            for rank in range(world_size):
                lines = saved.lines(section, Sharding(units, MeshSpec(world_size)), rank)
                for (_, layout), line in zip(units, lines, strict=True):
                    np.testing.assert_array_equal(line.astype(float), expected_line(layout, rank, bump))
    # The present format has the same bytes in the files of the ranks, but for the order of the header.
    again, (model, state) = tmp_path / "again", (saved.sections[name] for name in (MODEL, STATE))
    token = begin(again)
    for rank in range(3):
        lines = {name: saved.lines(name, saved.sections[name], rank) for name in (MODEL, STATE)}
        values = {name: saved.value(name) for name in saved.values}
        write_rank(again, token, rank, {MODEL: model, STATE: state}, lines, values if rank == 0 else None)
    finish(again, token, {MODEL: model, STATE: state}, {name: saved.value(name) for name in saved.values})
    for rank in range(3):
        for name in (MODEL, STATE):
            found = read(again).lines(name, saved.sections[name], rank)
            assert all(map(np.array_equal, found, saved.lines(name, saved.sections[name], rank)))


def test_recordings_of_format_3_are_read():
    found = Recording.open(FORMATS / "recording_3")
    assert found.manifest.token == "" and found.recorded_steps() == (0, 2)
    assert [type(layout) for _, layout in found.layouts()] == [PerParamLayout, FlatLayout]
    block = found.layouts()[1][1]
    assert isinstance(block, FlatLayout) and block.compute_dtype == "bfloat16"
    for name in synthetic.SHAPES:
        np.testing.assert_array_equal(found.full("parameters", 0, name), synthetic.initial(name, "float32"))
        assert found.full("update", 2, name).shape == synthetic.SHAPES[name]
    sketched = Recording.open(FORMATS / "recording_3_sketch")
    whole = np.sin(np.arange(600)).astype(np.float32)
    assert sketched.is_sketched("update", 0, "w")
    assert sketched.sketch("update", 0, "w").equals(sketches_of([whole], seed="w")[0])
    np.testing.assert_allclose(
        sketched.sketch("update", 0, "w").sums, sketches_of([whole], seed="w")[0].sums, atol=1e-12
    )


def test_recordings_of_format_4_are_read(tmp_path):
    found = Recording.open(FORMATS / "recording_4")
    synthetic.write_run(tmp_path, synthetic.manifest(dtype="float32", steps=2))
    again = Recording.open(tmp_path)
    assert compare(found, again).verdict is Verdict.EQUAL and found.recorded_steps() == (0, 1)
    for step in found.recorded_steps():
        assert found.activations(step) == again.activations(step)
        assert found.collectives(step, 1) == again.collectives(step, 1)
        for name in synthetic.SHAPES:
            np.testing.assert_array_equal(found.full("update", step, name), again.full("update", step, name))
            assert found.state_slots(step, name) == again.state_slots(step, name)


@pytest.mark.parametrize("form", [4, 6])
def test_sketches_that_depend_on_names_are_read(form):
    """Up to format 6. Those of later formats cannot be compared with them."""
    found = Recording.open(FORMATS / f"recording_{form}_sketch")
    whole = np.sin(np.arange(600)).astype(np.float32)
    assert found.sketch("update", 0, "w").equals(sketches_of([whole], seed="w")[0])
    with pytest.raises(RecordingError, match=r"keys of 'w' and of '': .*record both runs again"):
        found.sketch("update", 0, "w").equals(sketches_of([whole])[0])
    assert found.sample("w") is None
    assert found.count(0, "w") == 7.0 and found.learning_rates(0) == (0.5,)
    image = np.cos(np.arange(2 * 5 * 60)).astype(np.float32).reshape(2, 5, 60)
    for recording, made in (
        (found, image),
        (found.with_channels_first({("", "output")}), image.transpose(0, 2, 1)),
    ):
        sketch = recording.activation_sketch(0, 1, 0, "", "output")
        assert sketch is not None and sketch.equals(sketches_of([made], seed="output/0/")[0])


@pytest.mark.parametrize(("framework", "orders"), [("torch", {"torch"}), ("jax", {"torch", "unstated"})])
def test_activations_of_format_3_are_read(tmp_path, framework, orders):
    """Those of torch are in torch's order; of others with three dims or more it is not known."""

    def three_dims(phase, step, rank, name, array):
        return array[:, :, None] if phase == "output" and name == "block" else array

    made = synthetic.manifest(framework=framework)
    synthetic.write_run(tmp_path, made, tamper=three_dims)
    path = tmp_path / "manifest.json"
    was = hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 3}))
    for rank in range(2):
        synthetic.edit_events(tmp_path, was, hashlib.sha256(path.read_bytes()).hexdigest(), rank=rank)
        for _ in range(3):
            synthetic.edit_events(tmp_path, ', "order": "torch"', "", rank=rank)
    found = Recording.open(tmp_path)
    assert {found.activation_order(0, 0, *at).value for at in found.activations(0)} == orders
    assert found.activation(0, 0, 0, "block", "output").shape == (3, 4, 1)
    assert found.manifest == made  # which does not depend on the format


def test_places_by_another_rule_of_alignment_are_refused(tmp_path, monkeypatch):
    """As if a later version aligned parameters otherwise: it does not read what this one wrote by its own rule."""
    sharding = read(FORMATS / "checkpoint_2").sections[MODEL]
    token = begin(tmp_path / "c")
    for rank in range(3):
        lines = [np.zeros(layout.padded_shard_numel, np.float32) for _, layout in sharding.units]
        write_rank(tmp_path / "c", token, rank, {MODEL: sharding}, {MODEL: lines})
    finish(tmp_path / "c", token, {MODEL: sharding})
    synthetic.write_run(tmp_path / "r", synthetic.manifest())
    monkeypatch.setattr(flat, "ALIGNMENT_BYTES", 64)
    with pytest.raises(CheckpointError, match=r"index\.json: a flat layout states other places than the rules"):
        read(tmp_path / "c")
    with pytest.raises(RecordingError, match=r"'units': a flat layout states other places than the rules"):
        Recording.open(tmp_path / "r")


@pytest.mark.parametrize("kind", [FlatLayout, PerParamLayout, RaggedLayout])
def test_every_place_is_stated(tmp_path, kind):
    """Whatever number among the places is changed, checksums redone: the checkpoint is refused."""
    sharding = read(FORMATS / "checkpoint_2").sections[MODEL]
    units = tuple(unit for unit in sharding.units if isinstance(unit[1], kind))
    only = Sharding(units, MeshSpec(3))
    token = begin(tmp_path / "c")
    for rank in range(3):
        lines = [np.zeros(layout.padded_shard_numel, np.float32) for _, layout in only.units]
        write_rank(tmp_path / "c", token, rank, {MODEL: only}, {MODEL: lines})
    finish(tmp_path / "c", token, {MODEL: only})
    index = tmp_path / "c" / "index.json"
    text = index.read_text()
    places = json.loads(text)["content"]["sections"][MODEL][0]["layout"]["places"]
    for name, value in places.items():
        for i in range(len(value) if isinstance(value, list) else 1):
            wrapped = json.loads(text)
            own = wrapped["content"]["sections"][MODEL][0]["layout"]["places"]
            if isinstance(value, list):
                own[name][i] += 1
            else:
                own[name] += 1
            seal(index, wrapped)
            with pytest.raises(CheckpointError, match=f"states other places than the rules .*'{name}'"):
                read(tmp_path / "c")


def test_sketches_of_another_number_of_sums_are_refused(tmp_path):
    synthetic.write_run(tmp_path, synthetic.manifest())
    path = tmp_path / "manifest.json"
    assert json.loads(path.read_text())["sketches"] == sketch.SKETCHES
    path.write_text(path.read_text().replace('"num_sums": 256', '"num_sums": 512'))
    with pytest.raises(RecordingError, match=r"field 'sketches': expected .*'num_sums': 256.*'num_sums': 512"):
        Recording.open(tmp_path)


@pytest.mark.parametrize("form", [0, 1, 2, 9, "4", None, [4]])
def test_formats_that_are_not_read_are_named(tmp_path, form):
    shutil.copytree(FORMATS / "recording_3", tmp_path / "r")
    path = tmp_path / "r" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": form}))
    with pytest.raises(RecordingError, match="field 'format': expected 8, the format read here, got"):
        Recording.open(tmp_path / "r")
    shutil.copytree(FORMATS / "checkpoint_2", tmp_path / "c")
    wrapped = json.loads((tmp_path / "c" / "index.json").read_text())
    wrapped["content"]["format"] = form
    seal(tmp_path / "c" / "index.json", wrapped)
    with pytest.raises(CrossframeError, match="format differs from 'crossframe checkpoint 3'"):
        read(tmp_path / "c")


def seal(index, wrapped):
    """Write an index with a checksum that is right for it."""
    text = json.dumps(wrapped["content"], sort_keys=True)
    index.write_text(json.dumps(wrapped | {"sha256": hashlib.sha256(text.encode()).hexdigest()}))
