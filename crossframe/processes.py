"""Starts processes that end with the command that started them, however it ends.

[Note: Ending processes]
A signal may be sent to the command only, not to its process group. There are three mechanisms, each of which covers cases that
the previous one cannot:
1. The signal handler of the command sends a signal to its children and raises SystemExit, so that code that waits for a child
   continues and the command unwinds as after an error.
2. A thread of the command is notified by `signal.set_wakeup_fd`, also while the main thread is in C code. After GRACE_SECONDS, or
   at a second signal, it kills the remaining children and their descendants, and exits.
3. Each child watches its parent (`end_with_parent`) and ends itself if the parent is gone, for example killed by SIGKILL.
Descendants of children are found in /proc. On systems without it, they are left to mechanism 3 and to the children.
"""

import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

GRACE_SECONDS = 10.0
"""Time in which children must end after a signal."""
TERMINAL_SECONDS = 4.0
"""Time after which children that got SIGINT from the terminal, like the command, are sent it again."""
POLL_SECONDS = 0.05
PARENT_POLL_SECONDS = 0.5
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
_CHILD = Path(__file__).resolve().with_name("child.py")

_started: set["subprocess.Popen[str]"] = set()
_received: list[int] = []
_at_signal: set["_Identity"] = set()  # children and their descendants, which cannot be found once a child has ended
_starting = threading.Lock()


def received_signal() -> int | None:
    """The first signal that ends this command; None if it received none."""
    return _received[0] if _received else None


def end_on_signals() -> None:
    """Make SIGINT, SIGTERM and SIGHUP end this process and all processes that it started. Call it once, in the main thread.

    SIGHUP stays ignored if it was ignored, as under nohup. SIGINT does not: shells ignore it in background processes, but a
    SIGINT that is sent to this process is meant for it.
    """
    for number in _SIGNALS:
        if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _on_signal)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_end_at_last, args=(reader,), daemon=True).start()
    os.register_at_fork(after_in_child=_forget_signals)


def _forget_signals() -> None:
    """Reset signal handling in a forked child, which must not handle signals like its parent or write to its parent's pipe."""
    signal.set_wakeup_fd(-1)
    for number in _SIGNALS:
        if signal.getsignal(number) is _on_signal:
            signal.signal(number, signal.SIG_DFL)
    _started.clear()
    _received.clear()
    _at_signal.clear()


def _on_signal(number: int, _: Any) -> None:
    if _received:
        return  # the command unwinds, or the thread kills the remaining processes
    _received.append(number)
    _at_signal.update(_family(_child_ids()))
    _send(number)
    raise SystemExit(128 + number)


def _send(number: int, *, again: bool = False) -> None:
    """Send a signal to the children. Processes of multiprocessing run code of this project and are terminated at once."""
    if number != signal.SIGINT or again or not _in_foreground():
        for process in list(_started):
            with suppress(ProcessLookupError):
                process.send_signal(number)
    for process in multiprocessing.active_children():
        process.terminate()


def _in_foreground() -> bool:
    """Whether a terminal sends SIGINT both to this process and to its children."""
    with suppress(OSError, AttributeError):
        terminal = os.open(os.ctermid(), os.O_RDONLY | os.O_NOCTTY)
        try:
            return os.tcgetpgrp(terminal) == os.getpgrp()
        finally:
            os.close(terminal)
    return False


def _end_at_last(reader: int) -> None:
    """Mechanism 2 of [Note: Ending processes]."""
    first = next(number for (number,) in iter(lambda: os.read(reader, 1), b"") if number in _SIGNALS)
    began, sent_again, family = time.monotonic(), False, _family(_child_ids()) | _at_signal
    while (seconds := time.monotonic() - began) < GRACE_SECONDS + 1:
        ready, _, _ = select.select([reader], [], [], 0.2)
        if ready and os.read(reader, 1)[0] in _SIGNALS:
            break
        family |= _family(_child_ids()) | _at_signal
        if seconds > TERMINAL_SECONDS and not sent_again:
            sent_again = True
            if first == signal.SIGINT and _in_foreground():
                _send(first, again=True)
    _kill(family | _family(_child_ids()))
    with suppress(Exception):
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h")  # a progress bar hides the cursor
        print(f"crossframe: {ended_by(first)}", file=sys.stderr, flush=True)
    os._exit(128 + first)


def ended_by(number: int) -> str:
    """The message for a command that a signal ended."""
    return "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"


def end_children() -> None:
    """End all running processes that this process started."""
    end(_child_ids())


def end(process_ids: Iterable[int]) -> None:
    """Send SIGTERM to processes, and wait until they and their descendants have ended.

    Processes that do not end within GRACE_SECONDS are killed. If a signal ends this command, they have received it already and
    are not sent another one.
    """
    roots = list(process_ids)
    family = _family(roots) | _at_signal
    sent = {each for each in family if each.process_id in roots} if _received else set()
    limit = time.monotonic() + GRACE_SECONDS
    while left := {each for each in family if each.alive()}:
        if time.monotonic() > limit:
            _kill(left)
            return
        # Descendants are sent it only after the processes that started them have ended, since these should end them.
        first = {each for each in left if each.process_id in roots} or left
        for each in first - sent:
            each.send(signal.SIGTERM)
        sent |= first
        time.sleep(POLL_SECONDS)
        _child_ids()
        family |= _family(each.process_id for each in left)


def _child_ids() -> list[int]:
    """The running children. Children that have ended are reaped."""
    own = [process.pid for process in list(_started) if process.poll() is None]
    return own + [process.pid for process in multiprocessing.active_children() if process.pid is not None]


def _kill(family: Iterable["_Identity"]) -> None:
    for each in family:
        each.send(signal.SIGKILL)


class _Identity(NamedTuple):
    """A process, identified by its id and start time, since ids are reused. Without /proc, `started` is empty."""

    process_id: int
    started: str

    def alive(self) -> bool:
        if not self.started:
            try:
                os.kill(self.process_id, 0)
            except OSError:
                return False
            return True
        stat = _stat(self.process_id)
        return stat is not None and stat[19] == self.started and stat[0] != "Z"

    def send(self, number: int) -> None:
        if self.alive():
            with suppress(OSError):
                os.kill(self.process_id, number)


def _stat(process_id: int) -> list[str] | None:
    """The fields of /proc/ID/stat after the name: state, parent, ..., start time as the 20th; None if it does not exist."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _family(process_ids: Iterable[int]) -> set[_Identity]:
    """Processes and their descendants."""
    open_ids, found = list(process_ids), set()
    if not open_ids:
        return found
    children: dict[int, list[int]] = {}
    stats = {}
    with suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdecimal() and (stat := _stat(int(name))) is not None:
                stats[int(name)] = stat
                children.setdefault(int(stat[1]), []).append(int(name))
    while open_ids:
        process_id = open_ids.pop()
        found.add(_Identity(process_id, stats[process_id][19] if process_id in stats else ""))
        open_ids += children.get(process_id, [])
    return found


# Programs


def module_command(function: str, arguments: Sequence[str]) -> list[str]:
    """A command line that runs a function of this project, given as "module:function", in any current folder.

    The function reads `arguments` from sys.argv and returns an exit status.

    The process ends with this one. It uses the packages of this process: a folder `experiments` of the user is not mistaken for
    that of the project.
    """
    return [sys.executable, "-P", str(_CHILD), str(os.getpid()), function, *arguments]


def run(
    command: Sequence[str],
    *,
    captured: bool = False,
    prints_to_stderr: bool = False,
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> tuple[int, str]:
    """Run a program to its end.

    Args:
        captured: return its output instead of printing it.
        prints_to_stderr: send its standard output to standard error.
        environment: environment variables in addition to those of this process.
        timeout: seconds after which it and its descendants are ended; None: no limit.

    Returns:
        Its exit status, which is negative if a signal ended it, and its captured output.

    Raises:
        TimeoutError: it took longer than `timeout`.
    """
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if captured else {}
    if prints_to_stderr:
        pipes["stdout"] = 2
    variables = {**os.environ, **environment} if environment else None
    process = subprocess.Popen(command, text=True, errors="replace", env=variables, **pipes)
    _started.add(process)
    try:
        printed, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"it did not end within {timeout:g} seconds") from None
    finally:
        if process.poll() is None or _received:
            end([process.pid])
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
        _started.discard(process)
    return process.returncode, printed or ""


# Processes of multiprocessing


@dataclass(frozen=True)
class Child:
    """A target for a process of multiprocessing: calls a function in a process that ends with its parent."""

    target: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        end_with_parent()
        return self.target(*args)


@contextmanager
def starting() -> Iterator[None]:
    """A context in which to start processes of multiprocessing whose target is a `Child`.

    They inherit a blocked SIGINT, so that none of them prints a traceback before it is set up, and PYTHONSAFEPATH, so that
    modules in the current folder do not replace those of Python.
    """
    resource_tracker.ensure_running()  # it would unblock SIGINT
    with _starting:
        safe = os.environ.get("PYTHONSAFEPATH")
        os.environ["PYTHONSAFEPATH"] = "1"
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            if safe is None:
                del os.environ["PYTHONSAFEPATH"]
            else:
                os.environ["PYTHONSAFEPATH"] = safe


def end_with_parent(parent_id: int | None = None) -> None:
    """Make this process end when its parent is gone, and end without a traceback on SIGINT.

    Args:
        parent_id: process id of the parent; None: this is a process of multiprocessing.
    """
    parent: Any = multiprocessing.parent_process()
    if parent_id is None:
        assert parent is not None, "not a process of multiprocessing"
        _die_with_parent_in_linux()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def watch() -> None:
        if parent_id is None:
            parent.join()
        else:
            while os.getppid() == parent_id:
                time.sleep(PARENT_POLL_SECONDS)
        for each in _family([os.getpid()]):
            if each.process_id != os.getpid():
                each.send(signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _die_with_parent_in_linux() -> None:
    """Ask the kernel to kill this process when its parent ends, even if the watching thread cannot run."""
    with suppress(Exception):
        import ctypes

        set_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        ctypes.CDLL(None).prctl(set_death_signal, int(signal.SIGKILL), 0, 0, 0)
