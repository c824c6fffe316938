"""Whatever stands in a folder, its loaders end with a result or with an error of the project's own that says where, soon, in
bounded memory, and nothing is deleted."""

import errno
import fcntl
import hashlib
import io
import os
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossframe import files
from crossframe.checkpoint import MODEL, CheckpointError, read
from crossframe.errors import CrossframeError, RecordingError
from crossframe.files import BLOCK, MOST_DIGITS, MOST_VALUES, FileError, VerifiedFile, open_regular, parse_json
from crossframe.recording import Manifest, Recording
from crossframe.recording.manifest import LONGEST_NAME
from crossframe.report.sentences import isolated
from crossframe.tensor_file import TensorFile, write_tensors
from tests.conftest import EXHAUSTIVE
from tests.core.helpers import synthetic
from tests.core.helpers.random_layouts import QUICK
from tests.core.programs import loaders as hostile

EVERY = 1 if EXHAUSTIVE in os.environ else 61


def test_any_value_and_any_file_is_read_or_refused(tmp_path):
    """In a process of 1 GiB; see tests.core.programs.loaders. `--exhaustive` runs every case."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.core.programs.loaders", str(tmp_path), str(EVERY)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    *wrong, last = done.stdout.splitlines() or [""]
    assert done.returncode == 0 and last.endswith("th run"), done.stderr[-2000:]
    assert not wrong, f"{len(wrong)} wrong, the first of them:\n" + "\n".join(wrong[:8])


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    """Valid folders: (make, what reads them) by name."""
    folder = tmp_path_factory.mktemp("right")
    for name, (make, _, _) in hostile.SUITES.items():
        make(folder / name)
    return folder


@pytest.mark.parametrize("name", hostile.SUITES)
@settings(QUICK, max_examples=400 if EXHAUSTIVE in os.environ else 30)
@given(data=st.data())
def test_changed_bytes_are_read_or_refused(name, data, right, tmp_path_factory):
    path = tmp_path_factory.mktemp("wrong") / "wrong"
    shutil.copytree(right / name, path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    for _ in range(data.draw(st.integers(1, 3))):
        file = data.draw(st.sampled_from(files))
        content = file.read_bytes()
        start = data.draw(st.integers(0, len(content)))
        stop = start + data.draw(st.integers(0, 9))
        new = data.draw(
            st.binary(max_size=9) | st.sampled_from([b"\n", b"{", b"[[", b'"', b"-1", b"1e999", b"\\u0000"])
        )
        file.write_bytes(content[:start] + new + content[stop:])
    before = sorted(path.rglob("*"))
    for use in hostile.SUITES[name][1]:
        try:
            use(path, right / name)
        except CrossframeError as error:
            assert len(str(error)) <= hostile.LONGEST_MESSAGE and "wrong" in str(error)
    assert sorted(path.rglob("*")) == before
    shutil.rmtree(path.parent)


def test_a_long_message_keeps_its_begin_and_its_end():
    whole = "b" * 1000 + "e" * 1000
    assert str(CrossframeError(whole)) == whole
    assert str(CrossframeError(whole + "d")) == "b" * 1000 + "e" * 333 + " [...] " + "e" * 658 + "d"
    assert CrossframeError(3 * whole, 1).args == (3 * whole, 1)


def test_a_disk_that_fails_is_named(tmp_path, monkeypatch):
    """Reads that end early, and reads that fail."""

    class Failing(io.BytesIO):
        def read(self, size=-1):
            if self.tell() >= 4:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read(min(size, 2))

    def opened(path, most_bytes=None):
        return Failing(b"123456"), length

    monkeypatch.setattr(files, "open_regular", opened)
    length = 4
    assert files.read_bytes("f", 9) == b"1234"
    length = 5
    with pytest.raises(FileError, match=r"^f: cannot be read \(Input/output error\)$"):
        files.read_bytes("f", 9)


@pytest.mark.parametrize(("number", "expected"), [(errno.ENOLCK, True), (errno.EWOULDBLOCK, False)])
def test_a_folder_on_a_disk_without_locks_counts_as_locked(tmp_path, monkeypatch, number, expected):
    def flock(descriptor, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with files.folder_lock(tmp_path) as held:
        assert held is expected


def test_a_file_that_changes_after_it_was_verified_is_refused(tmp_path):
    path = tmp_path / "t.safetensors"
    arrays = {name: np.full(BLOCK // 4, i, np.float32) for i, name in enumerate("abcd")}
    size, sha256 = write_tensors(path, arrays)
    whole = path.read_bytes()
    for change in ("cut off", "overwritten", "replaced by a folder", "gone"):
        file = TensorFile(path, sha256, size)
        np.testing.assert_array_equal(file.read("a", np.dtype(np.float32), (BLOCK // 4,)), arrays["a"])
        match change:
            case "cut off":
                os.truncate(path, 2 * BLOCK)
            case "overwritten":
                path.write_bytes(whole[: 3 * BLOCK] + b"\1" * 9 + whole[3 * BLOCK + 9 :])
            case _:
                path.unlink()
                if change != "gone":
                    path.mkdir()
        with pytest.raises(
            FileError, match=r"t\.safetensors: (was changed while|expected a file, got a folder|there is no)"
        ):
            file.read("d", np.dtype(np.float32), (BLOCK // 4,))
        if path.is_dir():
            path.rmdir()
        path.write_bytes(whole)
        np.testing.assert_array_equal(file.read("d", np.dtype(np.float32), (BLOCK // 4,)), arrays["d"])


def test_a_recording_that_changes_while_it_is_compared(tmp_path):
    synthetic.write_run(tmp_path, synthetic.manifest())
    found = Recording.open(tmp_path)
    found.full("update", 1, "embed")
    os.truncate(tmp_path / "rank00000" / "step00001.safetensors", 64)
    found._files.clear()  # as where more files are open than are kept
    with pytest.raises(RecordingError, match=r"step00001\.safetensors: has other content than was written"):
        found.full("reduce", 1, "embed")


def test_runs_of_a_file_are_its_bytes(tmp_path):
    content = np.random.default_rng(0).bytes(3 * BLOCK + 17)
    (tmp_path / "f").write_bytes(content)
    file = VerifiedFile(tmp_path / "f", hashlib.sha256(content).hexdigest())
    for start, stop in ((0, 0), (0, 1), (BLOCK - 1, BLOCK + 1), (5, 3 * BLOCK + 17), (3 * BLOCK, 3 * BLOCK + 17)):
        assert file.read(start, stop) == content[start:stop]


def test_a_pipe_is_refused_without_waiting_for_a_writer(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for read_it in (open_regular, lambda path: Manifest.read(path.parent)):
        (tmp_path / "manifest.json").unlink(missing_ok=True)
        (tmp_path / "manifest.json").symlink_to("pipe")
        said: list[str] = []

        def attempt(read_it=read_it, said=said):
            try:
                read_it(tmp_path / "manifest.json")
            except CrossframeError as error:
                said.append(str(error))

        thread = threading.Thread(target=attempt, daemon=True)
        thread.start()
        thread.join(60)
        assert said and "manifest.json: expected a file, got a pipe" in said[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 5000 + "]" * 5000, "nested too deep"),
        ("1" * (MOST_DIGITS + 1), f"an integer of {MOST_DIGITS + 1} digits"),
        ("-" + "9" * 5000, "an integer of 5000 digits"),
        ('"\\ud800"', "not Unicode"),
        (b"\xff", "not UTF-8"),
        ("[" + "0," * MOST_VALUES + "0]", f"more than {MOST_VALUES} values"),
    ],
    ids=range(6),
)
def test_json_that_is_not_parsed(text, said):
    with pytest.raises(ValueError, match=said) as caught:
        parse_json(text)
    assert len(str(caught.value)) < 200


def test_json_that_is_parsed():
    assert parse_json('{"a": [1, -9223372036854775808, 18446744073709551615, 1.5, "\\ud83d\\ude00"]}') == {
        "a": [1, -(2**63), 2**64 - 1, 1.5, "\U0001f600"]
    }


def test_another_dtype_in_the_file_than_in_the_index_is_refused(tmp_path):
    hostile.make_checkpoint(tmp_path / "c")
    (_, change), *_ = hostile._relabelled(tmp_path / "c")
    change(tmp_path / "c")
    saved = read(tmp_path / "c")
    with pytest.raises(
        CheckpointError, match=r"'model:0': expected shape .* of float32 \(as float32\), got shape .* of int32"
    ):
        saved.lines(MODEL, saved.sections[MODEL], 0)


@pytest.mark.parametrize(
    ("settings_", "said"),
    [
        ({"accumulate": "2"}, "'settings.accumulate': expected an int from 1 to 65536, got '2'"),
        ({"accumulate": 10**9}, "'settings.accumulate': expected an int from 1 to 65536, got 1000000000"),
        ({"betas": [0.9]}, "'settings.betas': expected two numbers"),
        ({"clip": float("inf")}, "'settings.clip': expected a finite number"),
        ({"lr": 10**400}, "'settings.lr': expected a finite number, got 1000"),
        ({"reduce_dtype": "float99"}, "'settings.reduce_dtype': expected one of float64"),
        ({"param_groups": [{"params": "w"}]}, "'settings.param_groups': expected a list of groups"),
    ],
    ids=range(7),
)
def test_settings_that_a_comparison_cannot_use_are_refused(settings_, said):
    with pytest.raises(RecordingError) as caught:
        synthetic.manifest(settings=settings_)
    assert said in str(caught.value) and len(str(caught.value)) < 600


def test_long_names_are_refused_and_sentences_of_them_take_no_time():
    with pytest.raises(RecordingError, match=f"'model': expected names of at most {LONGEST_NAME} characters"):
        synthetic.manifest(model="m" * (LONGEST_NAME + 1))
    name = "n" * 10**6
    assert isolated(name) == name and isolated(f"{name} \u05d0") == f"{name} \u2066\u05d0\u2069"


@pytest.mark.parametrize("path", ["a\0b", "a\udcff", "n" * 300, "x" * 5000], ids=range(4))
def test_paths_that_no_disk_has_are_named(tmp_path, path):
    for act in (lambda: read(tmp_path / path), lambda: Recording.open(tmp_path / path)):
        with pytest.raises(CrossframeError) as caught:
            act()
        assert len(str(caught.value)) < 1000 and str(caught.value).isprintable()
