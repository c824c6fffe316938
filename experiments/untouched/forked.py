"""Runs in forks of a process that has imported torch and transformers: a run of a small model takes less time than its imports.

A fork runs the code that a new process would run, with the same arguments and environment. Scripts of JAX run in new processes.
"""

import importlib
import multiprocessing
import os
import runpy
import socket
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from crossframe.processes import Child

TIMED_OUT = 124
_FORK = multiprocessing.get_context("fork")
_MODELS = ("bloom", "clip", "gemma2", "roberta")
_IMPORTED = (
    *("torch", "torch.distributed.tensor", "torch_backend.recorder.script", "crossframe.verdict"),
    *("experiments.cli.commands", "crossframe.cli.record", "typer._adapters"),
    *("matplotlib.figure", "matplotlib.backends.backend_svg", "matplotlib.backends.backend_agg"),
    *(f"transformers.models.{name}.modeling_{name}" for name in _MODELS),
)


def import_frameworks() -> None:
    """Import what scripts of torch and the commands import, but not JAX, whose presence recorders look at."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in _IMPORTED:
        with suppress(ModuleNotFoundError):  # of another version of a library: forks import what they need
            importlib.import_module(name)


def start(target: Callable[..., Any], *args: Any) -> BaseProcess:
    """Start a function in a fork, which ends with this process."""
    process = _FORK.Process(target=Child(target), args=args)
    process.start()
    return process


def call(targets: Sequence[tuple[Any, ...]], log: Path, timeout: float) -> tuple[int, str]:
    """Call functions side by side, each in a fork; returns the first exit status that is not 0, and the end of their output.

    Args:
        targets: (function, *arguments); a function returns its exit status.
        log: the file that their output is appended to.
        timeout: seconds after which all are ended; the exit status is then TIMED_OUT. All are ended too once one has failed.
    """
    limit, status = time.monotonic() + timeout, 0
    processes = [start(_logged, log, *target) for target in targets]
    while not status and (running := [each for each in processes if each.is_alive()]):
        ready = connection.wait([each.sentinel for each in running], timeout=max(0.0, limit - time.monotonic()))
        status = next((each.exitcode for each in processes if each.exitcode), 0 if ready else TIMED_OUT)
    for each in processes:
        each.kill()
        each.join()
    status = status or next((each.exitcode for each in processes if each.exitcode), 0)
    text = log.read_text(errors="replace")[-2000:] if log.exists() else ""
    return status, f"{text}\nit took longer than {timeout:g} seconds" if status == TIMED_OUT else text


def command(crossframe: Callable[[Sequence[str]], int], arguments: Sequence[str], log: Path, timeout: float) -> int:
    """Run the command `crossframe`; returns its exit status. The processes of `crossframe record` are forks of this one."""
    from crossframe.cli import record

    def run(command: Sequence[str], **_: bool) -> tuple[int, str]:
        function, *given = command[4:]  # of `crossframe.processes.module_command`
        world_size = int(given.pop(0)) if function.endswith(":launch") else 1
        main = function.replace(":launch", ":main")
        return call([(_main, main, given, each) for each in ranks(world_size)], log, timeout)

    record.run = run  # type: ignore[assignment]
    return crossframe(arguments)


def script(path: str, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a script as `python PATH ARGUMENTS` does."""
    os.environ.update(environment)
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")
    return 0


def new_process(path: str, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a script in a new process instead of this one."""
    os.execve(sys.executable, [sys.executable, path, *arguments], {**os.environ, **environment})


def ranks(world_size: int) -> list[dict[str, str]]:
    """The environment that torchrun gives each rank; empty for a single process, which needs no torchrun."""
    if world_size == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common |= {name: str(world_size) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


def _main(function: str, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    os.environ.update(environment)
    sys.argv = [function, *arguments]
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)()


def _logged(log: Path, target: Callable[..., int], *args: Any) -> None:
    finalizers: Any = weakref.finalize
    for each in [*finalizers._registry]:  # such as of temporary folders, which the process above still uses
        each.detach()
    with log.open("ab") as stream:
        for number in (1, 2):
            os.dup2(stream.fileno(), number)
    try:
        status = target(*args)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.exit(status)
