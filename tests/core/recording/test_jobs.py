"""Several jobs that record into one directory: one succeeds, each other one raises, and nothing of a user's is deleted."""

import errno
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from crossframe.errors import RecordingError, UsageError
from crossframe.files import folder_lock
from crossframe.recording import Manifest, Recording, RecordingWriter, create, create_recording
from crossframe.recording.event_format import perturbed_run_folder
from crossframe.recording.manifest import MANIFEST_NAME
from crossframe.report.page import write_report
from tests.core.helpers import synthetic


def record_one_step(writer, step):
    writer.batch(step, synthetic.digest(""), [])
    writer.loss(step, 1.0)
    writer.end_step(step)


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_jobs_that_begin_at_once_one_records(tmp_path, overwrite):
    """Four processes, with manifests that differ in their token alone; each records all ranks if it may begin."""
    if overwrite:
        synthetic.write_run(tmp_path / "run", synthetic.manifest(3))
    script = f"""
import sys
from pathlib import Path
from crossframe.errors import RecordingError, UsageError
from crossframe.files import folder_lock
from tests.core.helpers import synthetic
made = synthetic.manifest()
print(made.token, flush=True)
sys.stdin.readline()
try:
    synthetic.write_run(Path({str(tmp_path / "run")!r}), made, overwrite={overwrite})
    print("recorded")
except RecordingError as error:
    print(error)
"""
    jobs = [
        subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    tokens = [job.stdout.readline().strip() for job in jobs]  # type: ignore[union-attr]
    for job in jobs:
        job.stdin.write("\n")  # type: ignore[union-attr]
        job.stdin.flush()  # type: ignore[union-attr]
    said = [job.communicate(timeout=60)[0].strip() for job in jobs]
    # A job that overwrites and begins after another has finished records too.
    assert said.count("recorded") == 1 or (overwrite and "recorded" in said), said
    told = ("another job", "holds a recording already")
    assert all(any(words in each for words in told) for each in said if each != "recorded"), said
    found = Recording.open(tmp_path / "run")
    assert said[tokens.index(found.manifest.token)] == "recorded" and found.full("update", 2, "embed").any()
    assert {entry.name for entry in (tmp_path / "run").iterdir()} == {"manifest.json", "rank00000", "rank00001"}


@pytest.mark.parametrize("when", ["before its next step", "after its last step"])
def test_a_job_whose_recording_is_overwritten_raises(tmp_path, when):
    first, second = synthetic.manifest(1), synthetic.manifest(1)
    create_recording(tmp_path, first)
    writer = RecordingWriter(tmp_path, first, 0)
    for step in range(1 if "next" in when else 3):
        record_one_step(writer, step)
    synthetic.write_run(tmp_path, second, overwrite=True)
    with pytest.raises(RecordingError, match="recording of another job, not the one that rank 0 writes"), writer:
        if "next" in when:
            record_one_step(writer, 1)
    found = Recording.open(tmp_path)
    assert found.manifest.token == second.token and found.num_steps == 3


def test_a_rank_leaves_nothing_in_a_recording_that_another_job_begins(tmp_path):
    """The other job holds the lock and has not written its manifest yet, as `create_recording` has it for a moment."""
    first, second = synthetic.manifest(1), synthetic.manifest(1)
    create_recording(tmp_path, first)
    ready, pool = threading.Event(), ThreadPoolExecutor(1)
    with folder_lock(tmp_path):
        opened = pool.submit(lambda: (ready.set(), RecordingWriter(tmp_path, first, 0)))
        ready.wait()
        with pytest.raises(TimeoutError):
            opened.result(timeout=0.2)
        (tmp_path / MANIFEST_NAME).unlink()
        (tmp_path / MANIFEST_NAME).write_bytes(second.to_bytes())
    with pytest.raises(RecordingError, match="recording of another job"):
        opened.result(timeout=60)
    with RecordingWriter(tmp_path, second, 0) as writer:
        for step in range(3):
            record_one_step(writer, step)
    assert Recording.open(tmp_path).num_steps == 3


def test_a_rank_of_another_job_does_not_enter(tmp_path):
    first, second = synthetic.manifest(), synthetic.manifest()
    create_recording(tmp_path, first)
    with pytest.raises(RecordingError, match="holds a recording already"):
        create_recording(tmp_path, second)
    with pytest.raises(RecordingError, match="recording of another job"):
        RecordingWriter(tmp_path, second, 1)
    with pytest.raises(RecordingError, match="expected 3 whole steps"), RecordingWriter(tmp_path, first, 1):
        pass


def test_a_folder_that_is_in_use_is_told(tmp_path):
    with folder_lock(tmp_path) as held:
        assert held
        with folder_lock(tmp_path) as again:
            assert not again
        with pytest.raises(RecordingError, match="another job began to record here at the same time"):
            create_recording(tmp_path, synthetic.manifest())
        with pytest.raises(UsageError, match="another process writes a report there; pass another directory"):
            write_report(tmp_path, {}, [])
    assert not list(tmp_path.iterdir())
    create_recording(tmp_path, synthetic.manifest())


@pytest.mark.parametrize("name", ["rank00000-notes", "rank7", "twin1", "rankings", "manifest.json.parts"])
def test_folders_with_names_like_ours_stay(tmp_path, name):
    synthetic.write_run(tmp_path, synthetic.manifest())
    (tmp_path / name).mkdir()
    (tmp_path / name / "events.jsonl").write_text("mine")
    create_recording(tmp_path, synthetic.manifest(), overwrite=True)
    assert (tmp_path / name / "events.jsonl").read_text() == "mine"


def test_a_step_file_of_the_users_is_not_deleted(tmp_path):
    synthetic.write_run(tmp_path, synthetic.manifest())
    (tmp_path / "rank00000" / "step-by-step.safetensors").write_text("mine")
    with pytest.raises(RecordingError, match=r"'step-by-step\.safetensors' is not part of a recording"):
        create_recording(tmp_path, synthetic.manifest(), overwrite=True)


def test_folders_like_a_recordings_without_a_manifest_stay(tmp_path):
    (tmp_path / "rank00000").mkdir()
    (tmp_path / "rank00000" / "events.jsonl").write_text("mine")
    with pytest.raises(RecordingError, match="not a recording that can be read"):
        create_recording(tmp_path, synthetic.manifest(), overwrite=True)
    assert (tmp_path / "rank00000" / "events.jsonl").read_text() == "mine"


@pytest.mark.parametrize("stage", ["taken", "aside"])
def test_what_a_killed_beginning_left_is_overwritten(tmp_path, stage):
    synthetic.write_run(tmp_path, synthetic.manifest())
    if stage == "taken":
        (tmp_path / "manifest.json").rename(tmp_path / "manifest.json.0123456789abcdef.replaced")
    else:
        (tmp_path / "rank00000").rename(tmp_path / "manifest.json.0123456789abcdef.replaced")
    (tmp_path / "manifest.json.00000000ffffffff.part").write_text("{")
    synthetic.write_run(tmp_path, synthetic.manifest(), overwrite=True)
    assert {entry.name for entry in tmp_path.iterdir()} == {"manifest.json", "rank00000", "rank00001"}
    assert Recording.open(tmp_path).num_steps == 3


def test_a_disk_without_hard_links_begins_once(tmp_path, monkeypatch):
    def refuses(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuses)
    made = synthetic.manifest()
    synthetic.write_run(tmp_path, made)
    with pytest.raises(RecordingError, match="holds a recording already"):
        create_recording(tmp_path, synthetic.manifest())
    assert Manifest.read(tmp_path).token == made.token and Recording.open(tmp_path).num_steps == 3


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (
            errno.ENOSPC,
            r"no recording can begin there \(No space left on device\); make space, or pass another directory",
        ),
        (errno.EEXIST, "another job began to record here at the same time; record into another directory"),
        (errno.ENOENT, "another job began to record here at the same time; record into another directory"),
    ],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_manifest_that_cannot_be_given_its_name_leaves_what_was_there(
    tmp_path, monkeypatch, number, message, overwrite
):
    if overwrite:
        synthetic.write_run(tmp_path, synthetic.manifest())
    before = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.glob("rank*/*")}
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(number, os.strerror(number))))
    with pytest.raises(RecordingError, match=message):
        create_recording(tmp_path, synthetic.manifest(), overwrite=overwrite)
    assert {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.glob("rank*/*")} == before
    names = [path.name for path in tmp_path.iterdir() if not path.is_dir()]
    # The old manifest, under another name, shows that there was a recording.
    assert len(names) == overwrite and all(name.endswith(".replaced") for name in names)
    monkeypatch.undo()
    create_recording(tmp_path, synthetic.manifest(), overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_of_two_jobs_that_overwrite_the_later_one_keeps_what_it_wrote(tmp_path, monkeypatch):
    """The other job has replaced the manifest while this one clears the old recording away."""
    synthetic.write_run(tmp_path, synthetic.manifest())
    before = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.glob("rank*/*")}
    later, link = synthetic.manifest(), create._link

    def both(part, target):
        link(part, target)
        target.write_bytes(later.to_bytes())

    monkeypatch.setattr(create, "_link", both)
    with pytest.raises(RecordingError, match="another job began to record here at the same time; record into another"):
        create_recording(tmp_path, synthetic.manifest(), overwrite=True)
    assert {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.glob("rank*/*")} == before
    assert Manifest.read(tmp_path).token == later.token
    # Or it has cleared the manifest away itself.
    monkeypatch.setattr(create, "_link", lambda part, target: (link(part, target), target.unlink()))
    with pytest.raises(RecordingError, match="another job began to record here"):
        create_recording(tmp_path, synthetic.manifest(), overwrite=True)
    assert {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.glob("rank*/*")} == before


def test_files_of_the_users_in_folders_of_perturbed_runs_are_not_deleted(tmp_path):
    for folder in (tmp_path, tmp_path / perturbed_run_folder(1)):
        synthetic.write_run(folder, synthetic.manifest())
    notes = tmp_path / perturbed_run_folder(1) / "rank00001" / "notes"
    notes.write_text("mine")
    with pytest.raises(RecordingError, match="'notes' is not part of a recording; move it, nothing was deleted"):
        create_recording(tmp_path, synthetic.manifest(), overwrite=True)
    assert notes.read_text() == "mine" and Recording.open(tmp_path).num_steps == 3
    notes.unlink()
    create_recording(tmp_path, synthetic.manifest(), overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("limit", [0, 100, 4000])
def test_a_full_disk_is_named(tmp_path, limit):
    """A limit on the size of files, which fails as a full disk does."""
    script = f"""
import resource, signal, sys
from pathlib import Path
from crossframe.errors import RecordingError, UsageError
from crossframe.files import folder_lock
from tests.core.helpers import synthetic
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
try:
    synthetic.write_run(Path({str(tmp_path / "run")!r}), synthetic.manifest(1))
except RecordingError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "File too large); make space" in done.stdout, done.stderr
    with pytest.raises(RecordingError):
        Recording.open(tmp_path / "run")
