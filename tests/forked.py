"""Runs what a command starts in forks of a server that has torch loaded: a script of a second takes five more to import torch.

A fork has its own arguments, environment, folder and output, as a new process has. What is read when torch is imported (numbers
of threads in the environment) is that of the server, and torchrun is left out: its ranks are started at once.
"""

import importlib
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import connection

from experiments.untouched.forked import ranks
from tests.ranks import start_process


def run(
    command: Sequence[str],
    *,
    captured: bool = False,
    prints_to_stderr: bool = False,
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> tuple[int, str]:
    """`crossframe.processes.run` of a command line of `crossframe.processes.module_command`."""
    function, *arguments = command[4:]
    world_size = int(arguments.pop(0)) if function.endswith(":launch") else 1
    function = function.replace(":launch", ":main")
    variables = {**os.environ, **(environment or {})}
    with tempfile.NamedTemporaryFile() as log:
        processes = [
            start_process(_main, function, arguments, variables | of_rank, os.getcwd(), log.name)
            for of_rank in ranks(world_size)
        ]
        waiting = {process.sentinel: process for process in processes}
        while waiting and (ready := connection.wait(list(waiting), timeout)):
            for sentinel in ready:
                waiting.pop(sentinel).join()
            if any(process.exitcode for process in processes):
                break
        late = bool(waiting) and not any(process.exitcode for process in processes)
        for process in processes:
            process.kill()
            process.join()
        if late:
            raise TimeoutError(f"it did not end within {timeout:g} seconds")
        printed = log.read().decode(errors="replace")
    if not captured:
        print(printed, end="", file=sys.stderr if prints_to_stderr else sys.stdout)
    return next((process.exitcode for process in processes if process.exitcode), 0), printed if captured else ""


def _main(function: str, arguments: Sequence[str], variables: Mapping[str, str], folder: str, log: str) -> None:
    with open(log, "ab") as stream:
        for number in (1, 2):
            os.dup2(stream.fileno(), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = [function, *arguments]
    module, _, name = function.partition(":")
    sys.exit(getattr(importlib.import_module(module), name)())
