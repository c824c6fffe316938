"""Processes that a script starts by `torch.multiprocessing.spawn`: each is a rank and has a recorder, as under torchrun."""

import atexit
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from importlib import import_module
from typing import Any, NoReturn

import torch.multiprocessing
from torch.multiprocessing.spawn import ProcessExitedException

from crossframe.errors import UsageError
from crossframe.replacing import replacing
from crossframe.scripts import NOT_RECORDED, ScriptRecorder, flush_files, run_recorded

# torch.multiprocessing has a function of this name.
_spawn = import_module("torch.multiprocessing.spawn")


@dataclass(frozen=True)
class RecordedProcess:
    """What a started process runs.

    Attributes:
        function: of the script.
        recorder: makes the recorder of the process.
    """

    function: Callable[..., Any]
    recorder: Callable[[], ScriptRecorder]

    def __call__(self, *args: Any) -> NoReturn:
        if status := run_recorded(self.recorder(), partial(self.function, *args)):
            sys.exit(status)
        end_process()


@contextmanager
def recorded_processes(
    recorder: Callable[[], Callable[[], ScriptRecorder] | None],
    ended: Callable[[], None],
    forget: Callable[[], None],
) -> Iterator[None]:
    """A context in which processes that `torch.multiprocessing.spawn` or `start_processes` starts are recorded, unless they are
    forked.

    Args:
        recorder: returns what makes the recorder of a process; None: the process is not recorded.
        ended: called when processes that the script waits for have ended.
        forget: called in a forked process, which has a copy of the recorder of this one: stops it.
    """
    own = _spawn.start_processes

    @wraps(own)
    def start(
        fn: Callable[..., Any],
        args: Any = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
    ) -> Any:
        options: dict[str, Any] = {"join": join, "daemon": daemon, "start_method": start_method}
        if start_method == "fork":

            def forked(*args: Any) -> None:
                forget()
                fn(*args)

            return own(forked, args, nprocs, **options)
        if (made := recorder()) is None:
            return own(fn, args, nprocs, **options)
        try:
            context = own(RecordedProcess(fn, made), args, nprocs, **options)
        except ProcessExitedException as error:
            if error.exit_code == NOT_RECORDED:
                raise UsageError("a process that the script started was not recorded, as it says above") from None
            raise
        if join:
            ended()
        return context

    with ExitStack() as stack:
        for module in (_spawn, torch.multiprocessing):
            stack.enter_context(replacing(module, "start_processes", start))
        yield


def end_process() -> NoReturn:
    """End with exit status 0 as Python does, but without finalizing the interpreter.

    [Note: threads of gloo] They release tensors, for which they need the interpreter. A thread that asks for it while the
    interpreter is finalized aborts the process, and torchrun then ends ranks whose recordings may not be complete. The threads
    may outlive their process group, for which DDP and FSDP keep them.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    flush_files()
    os._exit(0)
