"""What cannot be recorded or read is refused in one clear line."""

import json
from dataclasses import replace

import numpy as np
import pytest

from crossframe.errors import ParamError, RecordingError
from crossframe.layout import FlatLayout
from crossframe.param_map import identity_map
from crossframe.params import ParamSpec
from crossframe.recording import Manifest, Recording, RecordingWriter, Schedule, create_recording, event_format
from crossframe.recording.dims import Order, channels_first
from crossframe.recording.silent_writer import SilentWriter
from crossframe.recording.sketch import sketches_of
from tests.core.helpers import synthetic
from tests.core.helpers.synthetic import edit_events


@pytest.fixture
def directory(tmp_path):
    synthetic.write_run(tmp_path / "run", synthetic.manifest())
    return tmp_path / "run"


@pytest.fixture
def writer(tmp_path):
    made = synthetic.manifest()
    create_recording(tmp_path / "new", made)
    writer = RecordingWriter(tmp_path / "new", made, 0)
    yield writer
    writer.__exit__(KeyboardInterrupt, None, None)


def edit_manifest(directory, **fields):
    path = directory / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def refused(match, directory):
    with pytest.raises(RecordingError, match=match) as caught:
        Recording.open(directory)
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_directory_without_a_recording(tmp_path):
    refused("expected the directory of a recording, but there is none", tmp_path / "absent")
    refused(r"has no manifest\.json; check the path", tmp_path)


def test_a_manifest_that_is_no_json(directory):
    (directory / "manifest.json").write_text("{")
    refused("expected JSON", directory)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"format": 1}, r"field 'format': expected 8, the format read here, got 1"),
        ({"steps": 0}, r"field 'steps': expected an int of at least 1, or none, got 0"),
        ({"steps": True}, r"field 'steps': expected int or NoneType, got True"),
        ({"seed": "0"}, r"field 'seed': expected int or NoneType, got '0'"),
        ({"detail": "half"}, r"field 'detail': expected 'full' or 'sketch', got 'half'"),
        (
            {"world_size": 10**9, "mesh": {"replicate": 1, "shard": 10**9}},
            "field 'world_size': expected at most 131072 ranks",
        ),
        (
            {"schedule": {"dense": 1, "every": 1, "windows": [[5, 5]]}},
            r"field 'schedule\.windows': expected \(start, stop\)",
        ),
        ({"schedule": {"dense": 1, "every": 1, "windows": [5]}}, r"field 'schedule\.windows': .* got \(5,\)"),
        ({"world_size": 3}, r"field 'world_size': expected 2, as 'mesh' says, got 3"),
        ({"mesh": {"replicate": 0, "shard": 2}}, r"field 'mesh': mesh axis 'replicate'"),
        ({"mesh": {"replicate": 2, "shard": 1}}, r"field 'units': expected the layout of unit '' over 1 ranks"),
        ({"dtype": "float99"}, r"field 'dtype': unknown dtype 'float99'"),
        ({"strategy": "none"}, r"field 'strategy': expected one of"),
        ({"token": "0" * 15}, r"field 'token': expected 16 hex digits, or none, got '0{15}'"),
        ({"token": "g" * 16}, r"field 'token': expected 16 hex digits, or none, got 'g{16}'"),
        ({"learning_rate": -1.0}, r"field 'learning_rate': expected a finite number"),
        ({"schedule": {"dense": 1, "windows": []}}, r"field 'every': expected int, got None"),
        ({"schedule": {"dense": 1, "every": 0, "windows": []}}, r"field 'schedule\.every'"),
        (
            {"param_map": []},
            r"field 'param_map': expected an entry for every parameter.* \['embed', 'bias', 'block\.w', 'block\.k_bias'\]",
        ),
        ({"param_map": [["a"]]}, r"field 'param_map'"),
        ({"units": []}, r"field 'units': expected at least one unit"),
        (
            {"units": [{"name": "", "layout": {"kind": "odd"}, "params": []}]},
            r"field 'units': unknown layout kind 'odd'",
        ),
        ({"units": [{"name": ""}]}, r"field 'params': expected list, got None"),
        ({"units": ["x"]}, r"field 'units': expected a list of objects"),
    ],
)
def test_a_manifest_with_a_wrong_field(directory, fields, match):
    edit_manifest(directory, **fields)
    refused(match, directory)


def test_a_parameter_that_stands_in_two_units(directory):
    layout = FlatLayout((ParamSpec("w", (2,)),), 2, keep_original=True)
    with pytest.raises(RecordingError, match=r"field 'units': the name 'w' belongs to two parameters"):
        synthetic.manifest(units=(("", layout), ("b", layout)), param_map=identity_map(["w"]))


def test_a_rank_that_is_missing(directory):
    for file in (directory / "rank00001").iterdir():
        file.unlink()
    (directory / "rank00001").rmdir()
    refused(r"expected 2 ranks, but rank00001 left no events\.jsonl", directory)
    assert Recording.open(directory, partial=True).num_steps == 0


def test_the_first_four_missing_ranks_are_named(tmp_path):
    create_recording(tmp_path, synthetic.manifest(6))
    refused(r"expected 6 ranks, but rank00000, rank00001, rank00002, rank00003 left no events\.jsonl; copy", tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ('"event": "batch"', '"event" "batch"', r"line 2: expected JSON"),
        ('"event": "batch"', '"event": "party"', r"line 2: expected an event among .*, got 'party'"),
        ('"event": "batch"', '"event": ["batch"]', r"expected an event among .*, got \['batch'\]"),
        ('"rank": 0', '"rank": 1', r"a line of rank 1 in the folder of rank 0"),
        ('"step": 0', '"step": 1', r"a line of step 1 inside step 0"),
        ('"digest": "', '"digest": "x', r"line 2: expected a sha256"),
        ('"sample_ids": [0', '"sample_ids": ["0"', r"expected sample ids that are ints"),
        ('"sample_ids": [', '"inputs": [[1, 2, 3]], "sample_ids": [', r"expected two ints for each array"),
        ('"value": ', '"value": "much", "was": ', r"expected a number, got 'much'"),
        ('"name": "embed"', '"name": "../../etc/passwd"', r"the manifest has no parameter '\.\./\.\./etc/passwd'"),
        ('"phase": "parameters"', '"phase": "../x"', r"expected a phase among"),
        ('"start": 0', '"start": -1', r"expected a range of the 12 elements of 'embed', got -1:"),
        ('"stop": 8, "dtype": "float64"', '"stop": 8, "dtype": "object"', r"unknown dtype 'object'"),
        ('"kind": "all_gather"', '"sort": "all_gather"', r"field 'kind' of a collective: expected str, got None"),
        ('"num_bytes": ', '"num_bytes": -', r"line \d+: expected bytes and ranks as ints of at least 0, got \{'kind'"),
        ('"group": [0, ', '"group": [0, -', r"expected bytes and ranks as ints of at least 0, got \{'kind'"),
        ('"group": [0, ', '"group": [0.0, ', r"expected bytes and ranks as ints of at least 0, got \{'kind'"),
        (
            '"microbatch": 0, "bucket"',
            '"microbatch": -1, "bucket"',
            r"expected bytes and ranks as ints of at least 0, got \{'kind'",
        ),
        ('"bucket": 0', '"bucket": -1', r"expected bytes and ranks as ints of at least 0, got \{'kind'"),
        ('{"event": "step", "step": 0,', '{"event": "step", "step": 1,', r"expected step 0 of 3, got 1"),
        (
            '{"event": "end", "steps": 3,',
            '{"event": "end", "steps": 4,',
            r"expected the end after 4 whole steps, got it after 3",
        ),
        ('"manifest": "', '"manifest": "0', r"written by another manifest"),
        (
            '{"event": "begin"',
            '{"event": "step", "step": 0, "sha256": ""}\n{"event": "begin"',
            "expected one 'begin' line",
        ),
        ('"value": 1', '"value": 2', r"the lines before it were changed since they were written"),
        ('"shape": [3, 4]', '"shape": [3, "4"]', r"expected a shape and a microbatch, got \[3, '4'\]"),
        (
            '"use": "output"',
            '"use": "output", "unit": "bloc"',
            r"an activation 'output' of unit 'bloc': the manifest has no such activation",
        ),
        ('"event": "loss"', '"event": "batch", "digest": "' + "0" * 64 + '", "sample_ids": []', r"has no loss"),
    ],
)
def test_a_damaged_line(directory, old, new, match):
    edit_events(directory, old, new, seal=False)
    refused(match, directory)


@pytest.mark.parametrize(("more", "match"), [("{}\n", "expected an event"), ("more", "text after the end")])
def test_lines_after_the_end(directory, more, match):
    path = directory / "rank00000" / "events.jsonl"
    text = path.read_text()
    path.write_text(text + more)
    refused(match, directory)
    path.write_text(text + text.splitlines(keepends=True)[-1])
    refused("a line after the end", directory)


def test_ranks_that_ended_after_other_numbers_of_steps(tmp_path):
    made = synthetic.manifest(steps=None)
    create_recording(tmp_path, made)
    for rank in (0, 1):
        with RecordingWriter(tmp_path, made, rank) as writer:
            for step in range(2 + rank):
                writer.batch(step, synthetic.digest(""), [])
                writer.loss(step, 1.0)
                writer.end_step(step)
    refused(r"ranks ended after \[2, 3\] steps; all must record the same, record it again", tmp_path)
    assert Recording.open(tmp_path, partial=True).num_steps == 2


@pytest.mark.parametrize(
    ("read", "match"),
    [
        (lambda r: r.batch(3, 0), "expected a step from 0 to 2, got 3"),
        (lambda r: r.batch(-1, 0), "expected a step from 0 to 2, got -1"),
        (lambda r: r.batch(True, 0), "expected a step from 0 to 2, got True"),
        (lambda r: r.batch(0, 2), r"run: .*rank.*, got 2"),
        (
            lambda r: r.activation(0, 1, 0, "none", "output"),
            "rank 1 recorded no output of module 'none' at step 0, microbatch 0",
        ),
    ],
)
def test_what_was_not_recorded_is_named(directory, read, match):
    with pytest.raises(RecordingError, match=match) as caught:
        read(Recording.open(directory))
    assert str(directory) in str(caught.value)


def test_a_parameter_without_elements_has_no_sketch(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "SHAPES", synthetic.SHAPES | {"bias": (0,)})
    monkeypatch.setattr(synthetic, "UNITS", synthetic.UNITS | {"": {"embed": (4, 3), "bias": (0,)}})
    recording = synthetic.record(tmp_path)
    assert recording.full("reduce", 0, "bias").shape == (0,)
    with pytest.raises(RecordingError, match=r"step 0, phase 'reduce', parameter 'bias': nothing was recorded$"):
        recording.sketch("reduce", 0, "bias")


def test_a_sample_that_was_changed_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("crossframe.recording.manifest.WHOLE", 0)
    recording = synthetic.record(tmp_path, synthetic.manifest(1, detail="sketch"))
    whole = recording.sample("embed")
    assert whole is not None and whole.places.size
    monkeypatch.setattr("crossframe.recording.reader.Sample.from_items", lambda *_: float("no number"))
    with pytest.raises(
        RecordingError, match=r"phase 'parameters', parameter 'embed': could not convert .*; record the run again"
    ):
        recording.sample("embed")


def test_a_manifest_that_was_changed_though_it_is_a_right_one(directory):
    edit_manifest(directory, seed=7)
    refused("written by another manifest", directory)


def test_a_manifest_that_is_larger_than_any(directory, monkeypatch):
    monkeypatch.setattr("crossframe.recording.manifest.LARGEST", 100)
    refused("expected at most 100 bytes", directory)


def test_tensors_that_were_changed(directory):
    path = directory / "rank00001" / "step00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(RecordingError, match=r"step00001\.safetensors: has other content than was written"):
        Recording.open(directory).full("update", 1, "block.w")


@pytest.mark.parametrize(
    ("event", "what"),
    [
        ("tensor", "'parameters' of 'embed'"),
        ("count", "the count of 'embed'"),
        ("activation", "the input of 'block'"),
    ],
)
def test_a_line_that_stands_twice(directory, event, what):
    path = directory / "rank00000" / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    i = next(i for i, line in enumerate(lines) if f'"{event}"' in line)
    path.write_text("".join([*lines[:i], lines[i], *lines[i:]]))
    refused(f"line {i + 2}: {what} occurs twice in step 0; record again", directory)


@pytest.mark.parametrize(
    ("place", "match"),
    [
        (
            ("forward", "", "block", "gradient"),
            "expected the phase of a tensor or an activation, got 'forward'",
        ),
        (("loss", "", "block", "output"), "expected the phase of a tensor or an activation, got 'loss'"),
        (("reduce", "block", "block.v", "reduced_grad"), "the manifest has no parameter 'block.v'"),
    ],
)
def test_a_disagreement_about_what_no_rank_records(directory, place, match):
    phase, unit, name, use = place
    fields = event_format.place(0, 0, "reduce", use, unit=unit, name=name) | {"phase": phase}
    line = event_format.encode("disagreement", fields | {"difference": 0.5, "axis": "tp", "ranks": [1]})
    edit_events(directory, '{"event": "step", "step": 0', line + '{"event": "step", "step": 0')
    refused(match, directory)


def test_a_line_and_a_file_that_are_longer_than_any(directory, monkeypatch):
    size = (directory / "rank00000" / "events.jsonl").stat().st_size
    monkeypatch.setattr("crossframe.recording.event_index.LARGEST_EVENTS", size - 1)
    refused(
        f"expected at most {size - 1} bytes, got {size}; copy the recording again, or record the run again", directory
    )
    monkeypatch.undo()
    monkeypatch.setattr("crossframe.recording.event_index.LONGEST_LINE", 50)
    refused("line 1: expected a line of at most 50 bytes; damaged, record again", directory)


def test_tensors_that_are_cut_off_or_missing(directory):
    path = directory / "rank00001" / "step00001.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    recording = Recording.open(directory)
    with pytest.raises(RecordingError, match=r"rank00001/step00001\.safetensors: has other content"):
        recording.full("update", 1, "block.w")
    path.unlink()
    with pytest.raises(RecordingError, match="there is no such file"):
        recording.full("update", 1, "block.w")


def test_tensors_that_are_not_what_the_line_says(directory):
    edit_events(directory, '"stop": 8, "dtype": "float64"', '"stop": 8, "dtype": "float32"')
    with pytest.raises(RecordingError, match=r"expected one dtype on all ranks"):
        Recording.open(directory).full("parameters", 0, "embed")
    edit_events(directory, '"stop": 12, "dtype": "float64"', '"stop": 12, "dtype": "float32"', rank=1)
    with pytest.raises(RecordingError, match=r"expected shape \(8,\) of float32 .* of float64"):
        Recording.open(directory).full("parameters", 0, "embed")


def test_pieces_that_do_not_cover_the_parameter(tmp_path):
    made = synthetic.manifest(2, steps=1)
    create_recording(tmp_path, made)
    for rank, (start, stop) in enumerate([(0, 8), (7, 12)]):
        with RecordingWriter(tmp_path, made, rank) as writer:
            writer.batch(0, synthetic.digest(""), [0])
            writer.loss(0, 0.0)
            writer.updated(0, "", {"embed": (start, stop, np.zeros(stop - start))})
            writer.end_step(0)
    with pytest.raises(
        RecordingError, match=r"each of 12 elements from exactly one .* element 8 is the first in none or in two"
    ):
        Recording.open(tmp_path).full("update", 0, "embed")
    with pytest.raises(RecordingError, match=r"element 0 is the first in none"):
        Recording.open(tmp_path).full("update", 0, "bias")
    with pytest.raises(RecordingError, match=r"rank 1 recorded no local gradient of 'embed' at step 0"):
        Recording.open(tmp_path).local(0, 1, "embed")


def test_what_is_no_recording_is_never_deleted(tmp_path):
    (tmp_path / "manifest.json").write_text('{"name": "a web app"}')
    with pytest.raises(RecordingError, match="not empty and not a recording"):
        create_recording(tmp_path, synthetic.manifest(), overwrite=True)
    assert (tmp_path / "manifest.json").read_text() == '{"name": "a web app"}'
    with pytest.raises(RecordingError, match="a file or a link"):
        create_recording(tmp_path / "manifest.json", synthetic.manifest())


def test_what_an_interrupted_beginning_left_is_not_deleted_where_another_file_lies_beside_it(tmp_path):
    synthetic.write_run(tmp_path, synthetic.manifest())
    (tmp_path / "manifest.json").rename(tmp_path / "manifest.json.part")
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(RecordingError, match="not empty and not a recording"):
        create_recording(tmp_path, synthetic.manifest(), overwrite=True)
    assert (tmp_path / "rank00001" / "events.jsonl").is_file()


def test_a_step_ends_once_and_in_its_order(tmp_path):
    made = synthetic.manifest(1)
    create_recording(tmp_path, made)
    with RecordingWriter(tmp_path, made, 0) as writer:
        for step in range(3):
            writer.batch(step, synthetic.digest(""), [])
            writer.loss(step, 1.0)
            for other in {0, 1, 2, 3} - {step}:
                with pytest.raises(RecordingError, match=f"expected step {step} of 3, got {other}; steps are recorded"):
                    writer.end_step(other)
            writer.end_step(step)
        with pytest.raises(RecordingError, match="expected step 3 of 3, got 3"):
            writer.end_step(3)
        with pytest.raises(RecordingError, match="expected step 3 of 3, got 3"):
            writer.batch(3, synthetic.digest(""), [])
    assert Recording.open(tmp_path).num_steps == 3


def test_a_link_is_not_recorded_into(tmp_path, directory):
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    for target in (directory, tmp_path / "absent"):
        link = tmp_path / f"to {target.name}"
        link.symlink_to(target)
        with pytest.raises(RecordingError, match="a file or a link"):
            create_recording(link, synthetic.manifest(), overwrite=True)
    assert before == {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    assert not (tmp_path / "absent").exists()


def test_a_recording_is_begun_in_folders_that_are_not_there_yet(tmp_path):
    made = synthetic.manifest(settings={"rate": 0.5})
    assert create_recording(str(tmp_path / "a" / "b"), made) == tmp_path / "a" / "b"
    assert create_recording(tmp_path / "a" / "b", made, overwrite=True) == tmp_path / "a" / "b"
    for value in (float("nan"), float("inf")):
        with pytest.raises(RecordingError, match="expected JSON"):
            create_recording(tmp_path / "c", synthetic.manifest(settings={"rate": value}))
    assert not (tmp_path / "c").exists()


def test_links_and_files_named_like_a_rank_stay(tmp_path, directory):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "events.jsonl").write_text("mine")
    (directory / "rank00007").symlink_to(tmp_path / "mine")
    (directory / "rank00008").write_text("mine")
    create_recording(directory, synthetic.manifest(), overwrite=True)
    assert sorted(path.name for path in directory.iterdir()) == ["manifest.json", "rank00007", "rank00008"]
    assert (tmp_path / "mine" / "events.jsonl").read_text() == (directory / "rank00008").read_text() == "mine"


def test_a_recording_with_other_files_among_its_own_is_not_deleted(directory):
    (directory / "rank00000" / "thesis.tex").write_text("")
    with pytest.raises(RecordingError, match=r"'thesis\.tex' is not part of a recording"):
        create_recording(directory, synthetic.manifest(), overwrite=True)
    assert Recording.open(directory).num_steps == 3


def test_settings_that_are_no_json(tmp_path):
    with pytest.raises(RecordingError, match="expected JSON"):
        create_recording(tmp_path, synthetic.manifest(settings={"model": object()}))


def test_a_writer_of_another_run_or_rank(tmp_path, directory):
    made = Manifest.read(directory)
    with pytest.raises(RecordingError, match="written already"):
        RecordingWriter(directory, made, 0)
    with pytest.raises(RecordingError, match="not what rank 0 is about to record"):
        RecordingWriter(directory, replace(made, seed=1), 0)
    with pytest.raises(RecordingError, match="the recording of another job, not the one that rank 0 writes"):
        RecordingWriter(directory, synthetic.manifest(), 0)
    with pytest.raises(RecordingError, match=r"has no manifest\.json"):
        RecordingWriter(tmp_path, synthetic.manifest(), 0)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda w: w.loss(1, 0.0), "expected step 0 of 3, got 1"),
        (lambda w: w.batch(0, "abc", []), "expected the sha256"),
        (lambda w: (w.loss(0, 0.0), w.loss(0, 0.0)), "'forward' recorded twice"),
        (lambda w: w.end_step(0), "step 0 ends without its batch and loss"),
        (lambda w: w.finish(), "expected 3 whole steps, as the manifest says, but 0 ended"),
        (lambda w: w.updated(0, "block", {"embed": (0, 1, np.zeros(1))}), "expected a parameter of unit 'block'"),
        (
            lambda w: w.updated(0, "", {"embed": (0, 2, np.zeros(1))}),
            r"expected 2 elements, 0:2 of 12, got 1",
        ),
        (lambda w: w.updated(0, "", {"embed": (12, 13, np.zeros(1))}), "12:13 of 12"),
        (lambda w: w.counts(0, {"none": 1.0}), "rank 0, step 0: the manifest has no parameter 'none'"),
        (lambda w: w.updated(0, "", {"embed": (0, 1, np.zeros(1, np.float32))}), "expected float64 .*got float32"),
        (lambda w: w.reduced_grads(0, "", {"embed": (0, 1, np.zeros(1, int))}), "unknown dtype 'int64'"),
        (lambda w: w.local_grads(0, "", {"embed": np.zeros(12)}), r"expected shape \(4, 3\), got \(12,\)"),
        (lambda w: w.local_grads(1, "", {}), "local gradients are recorded at dense steps only"),
        (
            lambda w: w.activation(1, 0, "", "output", np.zeros(3)),
            "activations are recorded at dense steps only: the first 1",
        ),
        (
            lambda w: w.activation(0, 0, "block", "grad", np.zeros(3)),
            "block'.*expected 'input' or 'output', got 'grad'",
        ),
        (
            lambda w: w.activation(0, -1, "block", "input", np.zeros(3)),
            "microbatch -1, .*expected a microbatch of 0 or more",
        ),
    ],
)
def test_what_a_writer_refuses(writer, call, match):
    with pytest.raises(ValueError, match=match):
        call(writer)


SKETCHED = sketches_of([np.arange(24.0)])[0]


@pytest.mark.parametrize(
    ("value", "options", "match"),
    [
        (
            np.zeros((2, 3)),
            {"order": Order.UNSTATED},
            r"expected 3 dims or more in an order that is not known, got \[2, 3\]",
        ),
        (np.zeros((2, 3, 4)), {"order": Order.UNSTATED}, None),
        (
            np.zeros((2, 3, 4)),
            {"order": Order.UNSTATED, "moved": SKETCHED},
            "expected the sketch with channels first exactly where",
        ),
        (np.zeros((2, 3, 4)), {"moved": SKETCHED}, "expected the sketch with channels first exactly where"),
        (SKETCHED, {"shape": (2, 3, 4)}, None),
        (SKETCHED, {"shape": (2, 3, 4), "moved": SKETCHED}, "expected the sketch with channels first exactly where"),
        (
            SKETCHED,
            {"shape": (2, 3, 4), "order": Order.CONVOLUTION},
            "expected the sketch with channels first exactly where",
        ),
        (SKETCHED, {"shape": (2, 3, 4), "order": Order.CONVOLUTION, "moved": SKETCHED}, None),
        (SKETCHED, {"shape": (2, 3)}, r"expected the shape of 24 sketched elements, got \(2, 3\)"),
        (SKETCHED, {}, "expected the shape of 24 sketched elements, got None"),
    ],
)
def test_an_activation_in_an_unknown_order_of_dims_has_a_sketch_in_both(writer, value, options, match):
    if match is None:
        writer.activation(0, 0, "block", "output", value, **options)
    else:
        with pytest.raises(RecordingError, match=f"rank 0, step 0, microbatch 0, output of module 'block': {match}"):
            writer.activation(0, 0, "block", "output", value, **options)


def test_a_large_activation_in_an_unknown_order_is_sketched_in_both(tmp_path, monkeypatch):
    monkeypatch.setattr("crossframe.recording.manifest.WHOLE", 20)
    made = synthetic.manifest(1, steps=1, detail="sketch")
    create_recording(tmp_path, made)
    large, small = (np.random.default_rng(0).normal(size=shape) for shape in ((2, 5, 3), (2, 5, 2)))
    with RecordingWriter(tmp_path, made, 0) as writer:
        writer.batch(0, synthetic.digest(""), [])
        writer.loss(0, 1.0)
        writer.activation(0, 0, "block", "input", large, order=Order.UNSTATED, operator="conv")
        writer.activation(0, 0, "block", "output", small, order=Order.UNSTATED)
        writer.end_step(0)
    recording = Recording.open(tmp_path)
    of = [(0, 0, 0, "block", use) for use in ("input", "output")]
    view = recording.with_channels_first([("block", use) for use in ("input", "output")])
    assert [recording.activation_operator(*each) for each in of] == ["conv", ""]
    assert [recording.activation_sketch(*each) is None for each in of] == [False, True]
    assert recording.activation_sketch(*of[0]).equals(sketches_of([large])[0])
    assert view.activation_sketch(*of[0]).equals(sketches_of([channels_first(large)])[0])
    np.testing.assert_array_equal(view.activation(*of[1]), channels_first(small))


@pytest.mark.parametrize("order", [Order.TORCH, Order.UNSTATED])
def test_large_integers_are_not_sketched(tmp_path, monkeypatch, order):
    monkeypatch.setattr("crossframe.recording.manifest.WHOLE", 20)
    made = synthetic.manifest(1, steps=1, detail="sketch")
    create_recording(tmp_path, made)
    with pytest.raises(ParamError, match="unknown dtype 'int64'"), RecordingWriter(tmp_path, made, 0) as writer:
        writer.activation(0, 0, "block", "input", np.zeros((2, 5, 3), np.int64), order=order)


def test_a_window_makes_steps_dense(tmp_path):
    made = synthetic.manifest(steps=20, schedule=Schedule(dense=1, every=10))
    create_recording(tmp_path, made)
    writers = [RecordingWriter(tmp_path, made, 0), SilentWriter(tmp_path, made, 1)]
    for writer in writers:
        for wrong in (0, -1, True, 1.0):
            with pytest.raises(
                RecordingError, match=f"expected the end of a dense window after step 0, got {wrong!r}$"
            ):
                writer.open_window(wrong)
        writer.open_window(4)
        writer.open_window(2)  # the longer one stays
        assert [step for step in range(20) if writer.is_dense(step)] == [0, 1, 2, 3]
        assert [step for step in range(20) if writer.records(step)] == [0, 1, 2, 3, 10, 19]
    writers[0]._file.close()


def test_a_silent_writer_writes_nothing(tmp_path):
    made = synthetic.manifest()
    create_recording(tmp_path, made)
    with SilentWriter(tmp_path, made, 1) as writer:
        writer.environment(b"{}")
        writer.batch(0, synthetic.digest(""), [0])
        writer.loss(0, 1.0)
        writer.counts(0, {"none": 1.0})
        writer.activation(0, 0, "block", "output", np.zeros(3))
        writer.local_grads(0, "", {"embed": np.zeros((4, 3))})
        writer.updated(0, "", {"embed": (0, 1, np.zeros(1))})
        writer.end_step(0)
        with pytest.raises(RecordingError, match="rank 1: expected the end of a dense window after step 1, got 1"):
            writer.open_window(1)
    writer.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_a_finished_writer_writes_one_end(tmp_path):
    made = synthetic.manifest(1, steps=None)
    create_recording(tmp_path, made)
    with RecordingWriter(tmp_path, made, 0) as writer:
        with pytest.raises(
            RecordingError, match="expected at least one whole steps, as the manifest says, but 0 ended"
        ):
            writer.finish()
        writer.batch(0, synthetic.digest(""), [])
        writer.loss(0, 1.0)
        writer.end_step(0)
        writer.finish()
        writer.finish()
    assert (tmp_path / "rank00000" / "events.jsonl").read_bytes().count(b'"end"') == 1
    assert Recording.open(tmp_path).num_steps == 1


def test_an_environment_is_written_once(writer):
    writer.environment(b"{}")
    assert (writer.folder / "environment.json").read_bytes() == b"{}"
    with pytest.raises(
        RecordingError, match=r"rank00000: rank 0, step 0: cannot be written \(File exists\); make space there, or"
    ):
        writer.environment(b"[]")
    assert (writer.folder / "environment.json").read_bytes() == b"{}"


def test_a_sketch_by_a_name_is_not_recorded(writer):
    sketch = replace(sketches_of([np.zeros(12)])[0], seed="embed")
    with pytest.raises(
        RecordingError, match="rank 0: expected a sketch whose keys depend on no name, got one of 'embed'"
    ):
        writer.parameters(0, "", {"embed": (0, 12, sketch)})


@pytest.mark.parametrize("slot", ["", "exp avg", 3, "a/b"])
def test_a_name_of_an_optimizers_state_that_is_none(writer, slot):
    with pytest.raises(
        RecordingError, match=f"expected the name of an optimizer's state, such as 'exp_avg', got {slot!r}$"
    ):
        writer.state(0, "", slot, {"embed": (0, 1, np.zeros(1))})


def test_a_step_off_the_schedule_holds_no_tensors(tmp_path):
    made = Manifest.from_json(synthetic.manifest().to_json() | {"schedule": {"dense": 0, "every": 2, "windows": []}})
    create_recording(tmp_path, made)
    with pytest.raises(KeyError), RecordingWriter(tmp_path, made, 0) as writer:
        writer.batch(0, synthetic.digest(""), [])
        writer.loss(0, 0.0)
        writer.end_step(0)
        with pytest.raises(RecordingError, match="the schedule records no tensors here"):
            writer.updated(1, "", {})
        raise KeyError  # and an exception leaves no end
    assert b'"end"' not in (tmp_path / "rank00000" / "events.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("dense", "every"), [(-1, 1), (1.0, 1), (True, 1), (0, 0), (0, 1.5), (0, True), (0, "1"), (None, 1)]
)
def test_a_schedule_that_is_none_is_refused(dense, every):
    with pytest.raises(RecordingError, match=r"schedule\.(dense|every)"):
        Schedule(dense, every)
