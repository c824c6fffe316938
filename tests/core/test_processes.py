"""Processes that a command starts end with it, whatever ends it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from crossframe import processes

ROOT = Path(__file__).parents[2]
FAMILY = 3  # a process of multiprocessing, a program, and the program's child
pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="finds processes by /proc")


def runs(process_id):
    """Whether a process runs: one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition):
    """Wait for a condition; a test that waits in vain fails."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_child_that_nobody_has_waited_for_has_ended(monkeypatch):
    killed = []
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0)
    monkeypatch.setattr(processes, "_kill", killed.append)
    child = subprocess.Popen([sys.executable, "-c", ""])
    wait_until(lambda: not runs(child.pid))
    processes.end([child.pid])
    assert not killed and child.wait() == 0


@pytest.fixture
def started(tmp_path):
    """Start the command of `family` in a session of its own, and wait until all its processes run."""
    left = []

    def start(manner=""):
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.core.programs.processes", str(tmp_path), manner],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        left.append(process.pid)
        wait_until(lambda: len(list(tmp_path.iterdir())) == FAMILY)
        family = [int(path.name) for path in tmp_path.iterdir()]
        left.extend(family)
        return process, family

    yield start
    for process_id in left:
        if runs(process_id):
            os.kill(process_id, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_to_the_command_ends_its_family(started, tmp_path, number):
    process, family = started()
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert not any(map(runs, family))
    assert "Traceback" not in said and (tmp_path / "unwound").exists()


def test_children_of_a_killed_command_end_themselves(started):
    process, family = started()
    process.kill()
    process.communicate(timeout=60)
    wait_until(lambda: not any(map(runs, family)))


def test_a_second_signal_kills_children_that_ignore_the_first(started):
    process, family = started("stubborn")
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: [each for each in family if not runs(each)])  # the process of multiprocessing, which does not
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    wait_until(lambda: not any(map(runs, family)))


def test_sighup_stays_ignored_under_nohup(started):
    process, _ = started("nohup")
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM


UNWINDS = """
import signal, sys, time
from pathlib import Path

signal.signal(signal.SIGTERM, lambda *_: sys.exit())
try:
    Path("started").touch()
    time.sleep(60)
finally:
    time.sleep(0.2)
    Path("unwound").touch()
"""


def test_a_process_that_is_ended_has_time_to_unwind(tmp_path):
    with subprocess.Popen([sys.executable, "-c", UNWINDS], cwd=tmp_path) as process:
        wait_until((tmp_path / "started").exists)
        processes.end([process.pid])
    assert (tmp_path / "unwound").exists()


SPEAKS = "import os, sys; print('out', os.environ.get('SAID')); print('err', file=sys.stderr); sys.exit(3)"
COMMAND = [sys.executable, "-u", "-c", SPEAKS]


def test_a_program_prints_or_is_captured(capfd):
    assert processes.run(COMMAND) == (3, "")
    assert capfd.readouterr() == ("out None\n", "err\n")
    assert processes.run(COMMAND, prints_to_stderr=True) == (3, "")
    assert capfd.readouterr() == ("", "out None\nerr\n")
    assert processes.run(COMMAND, captured=True, environment={"SAID": "this"}) == (3, "out this\nerr\n")
    assert capfd.readouterr() == ("", "") and "SAID" not in os.environ
    assert processes.run([sys.executable, "-c", "print(chr(0), end=chr(255))"], captured=True)[0] == 0
    own = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    assert processes.run(own) == (-signal.SIGKILL, "")


def test_a_program_has_the_environment_of_its_parent(monkeypatch):
    monkeypatch.setenv("SAID", "before")
    assert processes.run(COMMAND, captured=True)[1] == "out before\nerr\n"
    assert processes.run(COMMAND, captured=True, environment={"OTHER": "1"})[1] == "out before\nerr\n"


def test_a_program_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TimeoutError, match=r"^it did not end within 1\.5 seconds$"):
        processes.run([sys.executable, "-c", UNWINDS], timeout=1.5)
    assert (tmp_path / "unwound").exists()
    assert processes._started == set()


def test_processes_that_ignore_a_signal_are_killed(monkeypatch):
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.3)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        began = time.monotonic()
        processes.end([process.pid])
        assert 0.3 <= time.monotonic() - began < 30
        assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("before", [None, "0"])
def test_processes_start_without_sigint_and_own_modules(monkeypatch, before):
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    if before is not None:
        monkeypatch.setenv("PYTHONSAFEPATH", before)
    with pytest.raises(KeyError), processes.starting():
        assert os.environ["PYTHONSAFEPATH"] == "1"
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        raise KeyError
    assert os.environ.get("PYTHONSAFEPATH") == before
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_signal_is_named_to_the_user():
    assert processes.ended_by(signal.SIGINT) == "interrupted"
    assert processes.ended_by(signal.SIGTERM) == "ended by SIGTERM"


def test_own_packages_are_found_from_any_folder(tmp_path):
    for name in ("crossframe", "experiments", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('of the user')")
    # The user's folder is on PYTHONPATH of the started process, not of the one that starts it.
    code = (
        f"import os, sys; sys.path.insert(0, {str(ROOT)!r}); os.environ['PYTHONPATH'] = '.'\n"
        "from crossframe.processes import module_command, run\n"
        "sys.exit(run(module_command('crossframe.processes:received_signal', []))[0])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, env=environment, capture_output=True)
    assert ended.returncode == 0, ended.stderr
