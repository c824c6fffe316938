"""Saves checkpoints in a thread while training continues.

[Note: asynchronous saves] `AsyncSaver.save` copies the shards of this process to the host and returns. A thread writes them. In
the first process it then waits until the files of all ranks are in the folder, which all processes share, and gives the
checkpoint its name. The threads of different processes communicate by these files alone: collectives in a thread would run in
another order than those of the training step. Errors are exchanged in the main thread by `wait`, which all processes call. The
guarantees are those of a synchronous save (see [Note: ownership of a folder]): the folder has its name only when it is complete.
"""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from crossframe.checkpoint.writing import END, WRITING, Contents, Processes, Save

# Pauses between two looks at the files of other processes grow from the first of these to the second.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.01, 1.0
# How long a process that ends without `wait` waits for the files of others.
_PATIENCE_SECONDS = 60.0


class AsyncSaver:
    """Saves checkpoints while training continues. Pass it as `saver` to `save_checkpoint`, and call `wait` at the end.

    A save returns once the values are copied to the host, which needs the memory of this process's shards there. One save is
    written at a time: the next one waits for it. In a `with` statement `wait` is called at the end, unless the body raised. All
    processes make the same calls, from the same thread as their collectives. A process that ends normally writes its files first.
    """

    def __init__(self) -> None:
        self._pending: _Pending | None = None

    def __enter__(self) -> "AsyncSaver":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error other processes may not come to `wait`. The thread completes the checkpoint if all have written.
        if kind is None:
            self.wait()

    def save(
        self,
        path: Path | str,
        processes: Processes,
        contents: Callable[[], Contents],
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin a checkpoint; the arguments are those of `crossframe.checkpoint.save`, which a backend gives.

        Raises:
            CheckpointError: the save before failed, in which case this one does not begin; or this one cannot begin.
        """
        self.wait()
        each = Save(path, processes, about)
        each.begin(contents, copies=True)
        self._pending = _Pending(each)

    @property
    def is_saving(self) -> bool:
        """Whether this process still writes a checkpoint, or waits for the files of others. It may differ between processes."""
        return self._pending is not None and self._pending.is_alive()

    def wait(self) -> None:
        """Wait until the last checkpoint has its name. All processes call it.

        Raises:
            CheckpointError: it could not be written, or AgreementError in processes without an error of their own. Nothing is
                left of it.
        """
        if self._pending is not None:
            try:
                self._pending.wait()
            except Exception:
                self._pending = None
                raise
            self._pending = None


class _Pending:
    """A save that a thread writes; see [Note: asynchronous saves]."""

    def __init__(self, save: Save) -> None:
        self._save = save
        self._own_are_written = threading.Event()
        self._all_are_written = threading.Event()
        self._is_cancelled = False
        self._errors: dict[str, BaseException] = {}
        self._thread = threading.Thread(target=self._run, name=f"crossframe: save {save.path}")
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        self._try(WRITING, self._save.write)
        self._own_are_written.set()
        if self._save.processes.is_first and not self._errors and self._await_others():
            self._try(END, self._save.finish)

    def _try(self, title: str, act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:  # raised by `wait`
            self._errors[title] = error

    def _await_others(self) -> bool:
        """Wait until all files are there, or `wait` says so or cancels; whether the checkpoint is to be finished."""
        pause, ended = _FIRST_PAUSE_SECONDS, 0.0
        while not self._save.is_written() and not self._all_are_written.wait(pause):
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            if not threading.main_thread().is_alive():
                ended = ended or time.monotonic()
                if time.monotonic() - ended > _PATIENCE_SECONDS:
                    return False
        return not self._is_cancelled

    def _result(self, title: str) -> None:
        if title in self._errors:
            raise self._errors[title]

    def wait(self) -> None:
        def written() -> None:
            self._own_are_written.wait()
            self._result(WRITING)

        def finished() -> None:
            self._all_are_written.set()
            self._thread.join()
            self._result(END)

        together = self._save.processes.together
        try:
            together(WRITING, written)
            together(END, finished)
        except Exception:  # an interrupt ends the waiting, not the save
            self._is_cancelled = True
            self._all_are_written.set()
            self._thread.join()
            self._save.abandon()
            raise
