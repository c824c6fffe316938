"""Checkpoints that are written while training continues: copied first, complete or absent, errors on every process."""

import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from crossframe.checkpoint import MODEL, AsyncSaver, CheckpointError, Contents, async_saver, read, writing
from crossframe.errors import AgreementError
from tests.core.helpers.checkpoints import ThreadProcess, contents_of, line_of, made, writing_waits


def in_processes(num, act):
    """What `act(process)` returns in each process."""
    barrier, said = threading.Barrier(num), {}
    with ThreadPoolExecutor(num) as threads:
        return list(threads.map(lambda rank: act(ThreadProcess(rank, barrier, said)), range(num)))


def test_values_are_copied_before_save_returns(tmp_path):
    sharding = made("flat", 1)
    process, expected = ThreadProcess(0, threading.Barrier(1), {}), line_of(sharding, 0, padding=0)
    values, count = line_of(sharding, 0, padding=42), np.array(3)
    readers = []  # the threads that read values

    def lines(place):
        readers.append(threading.current_thread())
        return {MODEL: [values]}

    own = Contents({MODEL: sharding}, {"count": count}, [0], lines)
    saver = AsyncSaver()
    with writing_waits():
        saver.save(tmp_path / "c", process, lambda: own, {"step": 1})
        values[:], count[...] = 0, 4  # as the next step does, in place
        assert saver.is_saving and not (tmp_path / "c").exists()
    saver.wait()
    assert readers == [threading.main_thread()]
    saved = read(tmp_path / "c")
    np.testing.assert_array_equal(saved.lines(MODEL, sharding, 0)[0], expected)
    assert saved.value("count") == 3 and saved.about == {"step": 1} and not saver.is_saving


def test_a_save_is_waited_for_once(tmp_path):
    titles = []

    class Counted(ThreadProcess):
        def together(self, title, act):
            titles.append(title)
            return super().together(title, act)

    sharding = made("flat", 1)
    process, saver = Counted(0, threading.Barrier(1), {}), AsyncSaver()
    saver.wait()
    saver.save(tmp_path / "c", process, lambda: contents_of(sharding, process))
    for _ in range(2):
        saver.wait()
        assert len(titles) == 3 and not saver.is_saving
    with pytest.raises(CheckpointError, match="expected nothing there"):
        saver.save(tmp_path / "c", process, lambda: contents_of(sharding, process))
    saver.wait()
    assert len(titles) == 4


@pytest.mark.parametrize(("main_is_alive", "looks"), [(True, 10), (False, 4)])
def test_an_ended_process_waits_for_a_while(monkeypatch, main_is_alive, looks):
    """A look at the clock is 20 seconds after the one before; 60 seconds later it is too late."""
    pauses, times, main = [], iter(range(1000, 2000, 20)), SimpleNamespace(is_alive=lambda: main_is_alive)
    monkeypatch.setattr(async_saver, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(async_saver, "threading", SimpleNamespace(main_thread=lambda: main))
    pending = object.__new__(async_saver._Pending)
    pending._save = SimpleNamespace(is_written=lambda: len(pauses) == 10)
    pending._all_are_written = SimpleNamespace(wait=pauses.append)
    pending._is_cancelled = False
    assert pending._await_others() is main_is_alive
    assert pauses == [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0, 1.0][:looks]


def test_a_checkpoint_gets_no_name_when_wait_fails(tmp_path, monkeypatch):
    class Lost(ThreadProcess):
        def together(self, title, act):
            done = super().together(title, act)
            if title == writing.WRITING:
                raise AgreementError("a process is lost")
            return done

    monkeypatch.setattr(writing.Save, "is_written", lambda _: False)
    sharding, process, saver = made("flat", 1), Lost(0, threading.Barrier(1), {}), AsyncSaver()
    saver.save(tmp_path / "c", process, lambda: contents_of(sharding, process))
    with pytest.raises(AgreementError, match="a process is lost"):
        saver.wait()
    assert not [*tmp_path.iterdir()]


def test_a_checkpoint_of_several_processes_is_complete_without_wait(tmp_path):
    sharding = made("flat", 3)

    def act(process):
        saver = AsyncSaver()
        saver.save(tmp_path / "c", process, lambda: contents_of(sharding, process))
        deadline = time.monotonic() + 10
        while saver.is_saving:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return saver

    in_processes(3, act)
    for rank in range(3):
        (line,) = read(tmp_path / "c").lines(MODEL, sharding, rank)
        np.testing.assert_array_equal(line, line_of(sharding, rank, padding=0))


@pytest.mark.parametrize("raised_by", ["wait", "next save", "end of with"])
def test_an_error_of_one_process_is_raised_in_all(tmp_path, monkeypatch, raised_by):
    sharding, write = made("flat", 2), writing.write_tensors

    def full_disk(file, arrays):
        if file.parent.name.startswith("writing-c-") and file.name.startswith("rank00001"):
            raise OSError(28, "No space left on device")
        return write(file, arrays)

    monkeypatch.setattr(writing, "write_tensors", full_disk)

    def act(process):
        def save(name):
            saver.save(tmp_path / name, process, lambda: contents_of(sharding, process))

        saver = AsyncSaver()
        save("before")
        save("c")
        with pytest.raises((CheckpointError, AgreementError)) as caught:
            if raised_by == "wait":
                saver.wait()
            elif raised_by == "next save":
                save("not begun")
            else:
                with saver:
                    pass
        save("after")
        saver.wait()
        return caught.value

    first, second = in_processes(2, act)
    assert isinstance(first, AgreementError) and isinstance(second, CheckpointError)
    assert all("No space left on device" in str(error) for error in (first, second))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after", "before"]


PROGRAM = """
import sys, threading
from pathlib import Path
from crossframe.checkpoint import AsyncSaver
from tests.core.helpers.checkpoints import ThreadProcess, contents_of, made
sharding, process, saver = made("flat", 1), ThreadProcess(0, threading.Barrier(1), {}), AsyncSaver()
for number in range(int(sys.argv[2])):
    saver.save(Path(sys.argv[1], str(number)), process, lambda: contents_of(sharding, process))
"""


def test_a_process_that_ends_without_wait_or_is_killed_leaves_complete_checkpoints(tmp_path):
    sharding = made("flat", 1)
    subprocess.run([sys.executable, "-c", PROGRAM, tmp_path, "1"], check=True, timeout=60)
    read(tmp_path / "0").lines(MODEL, sharding, 0)
    folder = tmp_path / "killed"
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, folder, "100000"])
    deadline = time.monotonic() + 60
    while not (folder / "5").exists():
        assert time.monotonic() < deadline and process.poll() is None
    process.kill()
    assert process.wait() == -signal.SIGKILL
    named = [path for path in folder.iterdir() if not path.name.startswith("writing-")]
    assert {path.name for path in named} == {str(number) for number in range(len(named))}
    for path in named:
        (line,) = read(path).lines(MODEL, sharding, 0)
        np.testing.assert_array_equal(line, line_of(sharding, 0, padding=0))
