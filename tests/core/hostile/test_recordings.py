"""A recording that someone made to do harm is refused in one line: nothing is executed, and no memory is taken on its word."""

import hashlib
import json
import pickle
import struct

import pytest

from crossframe.errors import RecordingError
from crossframe.recording import Recording, Schedule
from tests.core.helpers import synthetic


@pytest.fixture
def directory(tmp_path):
    synthetic.write_run(tmp_path / "run", synthetic.manifest())
    return tmp_path / "run"


def put(directory, content):
    """Other tensors of step 1 of rank 0, and all checksums made right for them."""
    path = directory / "rank00000" / "step00001.safetensors"
    was = hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_bytes(content)
    synthetic.edit_events(directory, was, hashlib.sha256(content).hexdigest())


def header(fields, data=b""):
    text = json.dumps(fields).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape, offsets, dtype="F64"):
    return {"update/embed": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


HUGE, TERA = 1 << 62, 1 << 40
CONTENTS = {
    "a header of exabytes": struct.pack("<Q", HUGE) + b"{}",
    "a header longer than the file": struct.pack("<Q", 1 << 20) + b"{}",
    "no header": b"",
    "a pickle": pickle.dumps({"update/embed": [1.0] * 12}),
    "a shape of exabytes": header(entry([HUGE], [0, 8]), bytes(8)),
    "offsets outside the file": header(entry([8], [0, 64]), bytes(8)),
    "offsets before the data": header(entry([8], [-64, 0]), bytes(64)),
    "another dtype": header(entry([8], [0, 32], "F32"), bytes(32)),
    "another shape": header(entry([2, 4], [0, 64]), bytes(64)),
    "names that leave the folder": header(
        {"../../etc/passwd": {"dtype": "F64", "shape": [8], "data_offsets": [0, 64]}}, bytes(64)
    ),
    "json as deep as the stack": struct.pack("<Q", 200_000) + b"[" * 200_000,
}


@pytest.mark.parametrize("what", CONTENTS)
def test_tensors_of_which_the_checksum_is_right(directory, what):
    put(directory, CONTENTS[what])
    with pytest.raises(RecordingError, match=r"step00001\.safetensors") as caught:
        Recording.open(directory).full("update", 1, "embed")
    assert "\n" not in str(caught.value)


def test_a_pickle_is_not_loaded(directory, tmp_path):
    class Harm:
        def __reduce__(self):
            return (exec, (f"open({str(tmp_path / 'harm')!r}, 'w')",))

    put(directory, pickle.dumps(Harm()))
    with pytest.raises(RecordingError):
        Recording.open(directory).full("update", 1, "embed")
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("dense", [0, 1])
def test_a_manifest_with_a_parameter_of_terabytes_takes_no_memory(directory, dense):
    made = synthetic.manifest(schedule=Schedule(dense=dense, every=1))
    synthetic.write_run(directory, made, overwrite=True)
    path = directory / "manifest.json"
    was = hashlib.sha256(path.read_bytes()).hexdigest()
    fields = json.loads(path.read_text())
    fields["units"][0]["params"][0]["shape"] = [TERA]
    del fields["units"][0]["layout"]["places"]
    path.write_text(json.dumps(fields, indent=1) + "\n")
    for rank in range(2):
        synthetic.edit_events(directory, was, hashlib.sha256(path.read_bytes()).hexdigest(), rank=rank)
    with pytest.raises(RecordingError, match=f"{TERA} elements"):
        Recording.open(directory).full("update", 1, "embed")


def test_a_manifest_as_deep_as_the_stack(directory):
    (directory / "manifest.json").write_text("[" * 200_000)
    with pytest.raises(RecordingError, match=r"manifest\.json: expected JSON"):
        Recording.open(directory)


def test_a_line_as_deep_as_the_stack(directory):
    path = directory / "rank00000" / "events.jsonl"
    path.write_text("[" * 200_000 + "\n" + path.read_text())
    with pytest.raises(RecordingError, match=r"events\.jsonl, line 1: expected JSON"):
        Recording.open(directory)


def test_lines_that_are_no_text(directory):
    path = directory / "rank00000" / "events.jsonl"
    path.write_bytes(b"\xff\xfe\x00\n" + path.read_bytes())
    with pytest.raises(RecordingError, match=r"events\.jsonl, line 1: expected JSON"):
        Recording.open(directory)
