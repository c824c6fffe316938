"""What a run tells its user: a line of JSON for each step in a file, and on a terminal a bar."""

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from crossframe.checkpoint import flush
from crossframe.errors import UsageError
from experiments.train.together import Ranks, on_first

LINES = "metrics.jsonl"
NUM_SHOWN = 20  # steps that a run prints where no terminal shows its bar


class Journal:
    """The journal of one run, which rank 0 keeps. All ranks call `open` and `flush`; `write` and `say` are heard on rank 0 alone.

    Lines wait in memory while the disk is full. `flush` puts them on disk, so that a checkpoint is never without the lines of the
    steps before it.

    Args:
        folder: of the run. It is made, and locked until rank 0 leaves it or dies: one run at a time writes there.
        ranks: of the run.

    Raises:
        CheckpointError: the folder cannot be used, or another run writes there.
    """

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self.folder, self.ranks = folder, ranks
        self.console = Console(stderr=True, soft_wrap=True, highlight=False)
        self._first = ranks.rank == 0
        self._waiting = b""
        self._lines: Any = None
        self._lock: IO[str] | None = None
        self._told = ""
        on_first(self.ranks, f"locking {folder}", self._take_lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        """Another run may write to the folder."""
        for file in (self._lines, self._lock):
            if file is not None:
                file.close()

    def _take_lock(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / "lock").open("a+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            raise UsageError(
                f"another run writes here ({self._lock.read().strip() or 'it has just begun'}); end it, wait for it, or pass "
                "another --output"
            ) from None
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._lock.flush()

    def open(self, step: int) -> None:
        """Begin behind a step: lines of later ones are dropped, and what a killed run wrote in part.

        Raises:
            CheckpointError: the file cannot be written.
        """
        on_first(self.ranks, f"opening {self.folder / LINES}", lambda: self._open(step))

    def _open(self, step: int) -> None:
        path = self.folder / LINES
        before = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        rewritten = path.with_name(f"{LINES}.rewritten")
        rewritten.write_bytes(b"".join(line for line in before if 0 < _step_of(line) <= step))
        rewritten.replace(path)
        flush(self.folder)
        self._lines = path.open("ab", buffering=0)

    def write(self, line: dict[str, Any]) -> None:
        """Add the line of a step."""
        if not self._first:
            return
        self._waiting += json.dumps(line).encode() + b"\n"
        try:
            self._write_out()
            self._told = ""
        except OSError as error:
            if str(error) != self._told:
                self.say(f"{self.folder / LINES}: {error}; lines wait in memory")
            self._told = str(error)

    def flush(self) -> None:
        """Put all lines on disk.

        Raises:
            CheckpointError: that cannot be.
        """
        on_first(self.ranks, f"writing {self.folder / LINES}", self._flush)

    def _flush(self) -> None:
        self._write_out()
        os.fsync(self._lines.fileno())

    def _write_out(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[self._lines.write(self._waiting) :]

    def say(self, text: str) -> None:
        """Tell the user something."""
        if self._first:
            self.console.print(text, markup=False)

    @contextmanager
    def progress(self, step: int, steps: int) -> Iterator["_Shown"]:
        """Show how far the run is."""
        if self._first and self.console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            with Progress(*columns, console=self.console) as bar:
                yield _Shown(self, steps, bar, bar.add_task("", total=steps, completed=step))
        else:
            yield _Shown(self, steps)


class _Shown:
    """What shows how far a run is."""

    def __init__(self, journal: Journal, steps: int, bar: Progress | None = None, task: Any = None) -> None:
        self._journal, self._steps, self._bar, self._task = journal, steps, bar, task

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """A step has been taken."""
        said = f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=said)
        elif step % max(1, self._steps // NUM_SHOWN) == 0 or step == self._steps:
            self._journal.say(f"step {step} of {self._steps}  {said}")


def _step_of(line: bytes) -> int:
    """The step that a line tells of; 0 if it is no whole line."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else 0
    except (ValueError, KeyError, TypeError):
        return 0
