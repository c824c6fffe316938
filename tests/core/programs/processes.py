"""Programs for tests of processes: a command, its children, and their children. Each says that it runs by a file with its id."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from crossframe import processes
from crossframe.processes import Child, end_children, end_on_signals, module_command, received_signal, run, starting


def command():
    """Start a process of multiprocessing and a program that starts another; wait for them, and unwind when a signal comes."""
    folder, manner = sys.argv[1:]
    # As the command is started, whatever started the tests.
    signal.signal(signal.SIGHUP, signal.SIG_IGN if manner == "nohup" else signal.SIG_DFL)
    if manner == "stubborn":  # nothing but a second signal kills
        processes.GRACE_SECONDS = 1000.0
    end_on_signals()
    try:
        with starting():
            multiprocessing.get_context("spawn").Process(target=Child(rest), args=(folder,)).start()
        run(module_command("tests.core.programs.processes:program", [folder, manner]))
    finally:
        Path(folder, "unwound").touch()
        end_children()
        if number := received_signal():
            sys.exit(128 + number)


def program():
    """A program whose own child does not watch its parent."""
    folder, manner = sys.argv[1:]
    if manner == "stubborn":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    subprocess.Popen([sys.executable, "-c", f"import tests.core.programs.processes as f; f.rest({folder!r})"])
    rest(folder)


def rest(folder):
    """Say so, and do nothing."""
    Path(folder, str(os.getpid())).touch()
    time.sleep(1000)


if __name__ == "__main__":
    command()
