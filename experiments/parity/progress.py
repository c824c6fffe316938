"""Progress bars over recordings that are being written, by whichever process."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from crossframe.recording.progress import Progress as RecordingProgress
from experiments.parity.settings import RunSettings

POLL_SECONDS = 0.2


def bars(label: str, settings: RunSettings, output: Path, perturbed_runs: int) -> list[tuple[str, Path]]:
    """A bar for a run and one for each of its perturbed runs."""
    return [
        (label + (f", perturbed run {run.perturbed_run}" if run.perturbed_run else ""), path)
        for run, path in settings.runs(output, perturbed_runs)
    ]


@contextmanager
def watch(console: Console, runs: Sequence[tuple[str, Path]], settings: RunSettings) -> Iterator[None]:
    """Show a bar for each (label, recording) while the context lasts. The steps that count are those on disk."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
    )
    done = threading.Event()
    with Progress(*columns, console=console) as progress:
        bars = [
            (progress.add_task(label, total=settings.steps), path, RecordingProgress(path, settings.world_size))
            for label, path in runs
        ]

        def poll() -> None:
            for task, _, recording in bars:
                progress.update(task, completed=recording.steps_done())

        def loop() -> None:
            while not done.wait(POLL_SECONDS):
                poll()

        thread = threading.Thread(target=loop, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            poll()
