"""The loop of a training run, whatever the framework: resume, steps, metrics, checkpoints, and a clean stop."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from crossframe.checkpoint import AsyncSaver, CheckpointError
from experiments.train.checkpoints import Checkpoints
from experiments.train.journal import Journal
from experiments.train.settings import TrainSettings
from experiments.train.together import Ranks


class Trainer(Protocol):
    """A model and its optimizer, sharded. All ranks call every method."""

    def step(self, step: int, asked: Callable[[], bool]) -> tuple[float, float, bool]:
        """Take a step, which follows from the settings and its number alone.

        Args:
            asked: whether this rank was asked to stop by now; called late in the step.

        Returns:
            The loss and the norm of its gradient, of the whole batch, and whether any rank was asked to stop.
        """
        ...

    def save(self, path: Path, about: dict[str, Any], saver: AsyncSaver | None) -> None:
        """Write a checkpoint to a new folder, with a saver while training continues."""
        ...

    def load(self, path: Path) -> None:
        """Take over the state of a checkpoint, whichever framework wrote it."""
        ...


def run(settings: TrainSettings, ranks: Ranks, make: Callable[[], Trainer]) -> bool:
    """Train to the end, or until SIGTERM asks to stop. All ranks call it.

    Args:
        make: called once a checkpoint is found, or there is none.

    Returns:
        Whether the last step that was taken is in a checkpoint.

    Raises:
        CrossframeError: settings, a folder or a checkpoint that cannot be used.
    """
    with _asked_to_stop() as asked, Journal(settings.output, ranks) as journal:
        checkpoints = Checkpoints(settings.output / "checkpoints", settings.keep, ranks, journal.say)
        found = checkpoints.find(settings.resume)
        changes = settings.changes_from(found.settings) if found else []
        trainer = make()
        saving = _Saving(settings, trainer, checkpoints, journal)
        step, stopping = 0, False
        if found:
            trainer.load(found.path)
            step = found.step
            journal.say(f"going on from {found.path}, step {step}")
            for change in changes:
                journal.say(f"CHANGED: {change}")
        journal.open(step)

        with journal.progress(step, settings.steps) as shown:
            while step < settings.steps and not stopping:
                began = time.perf_counter()
                loss, norm, stopping = trainer.step(step, lambda: bool(asked))
                step += 1
                speed = settings.batch_size * settings.definition.terms / (time.perf_counter() - began)
                journal.write({"step": step, "loss": loss, "grad_norm": norm, "tokens_per_second": round(speed, 1)})
                shown.update(step, loss, speed)
                if step % settings.checkpoint_every == 0 or step == settings.steps or stopping:
                    saving.save(step)
            saving.wait()
        if stopping:
            journal.say(f"asked to stop: stopped at step {step} of {settings.steps}")
        return saving.is_saved


class _Saving:
    """Writes the checkpoints of a run. If one cannot be written, as on a full disk, the run goes on: older checkpoints are as
    they were, and there may be space for the next.

    Attributes:
        is_saved: whether the last checkpoint is saved; True if there was none to save. With `async_save`, valid after `wait`.
    """

    def __init__(self, settings: TrainSettings, trainer: Trainer, checkpoints: Checkpoints, journal: Journal) -> None:
        self.is_saved = True
        self._settings, self._trainer, self._checkpoints, self._journal = settings, trainer, checkpoints, journal
        self._saver = AsyncSaver() if settings.async_save else None
        self._step = 0

    def save(self, step: int) -> None:
        """Write a checkpoint, or begin to write it."""
        self.wait()
        self._step, self.is_saved = step, True
        with self._continuing():
            self._journal.flush()
            self._checkpoints.save(
                step, lambda path, about: self._trainer.save(path, about, self._saver), self._settings.what()
            )

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is there."""
        if self._saver is not None:
            with self._continuing():
                self._checkpoints.wait(self._step, self._saver.wait)

    @contextmanager
    def _continuing(self) -> Iterator[None]:
        """Report an error of a checkpoint, and go on."""
        try:
            yield
        except CheckpointError as error:
            self.is_saved = False
            self._journal.say(
                f"NOT SAVED at step {self._step}: {error}. Older checkpoints are as they were; the run goes on"
            )


@contextmanager
def _asked_to_stop() -> Iterator[list[int]]:
    """A list that is not empty once SIGTERM came, as torchrun and SLURM send it to end a job that may still save."""
    asked: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)
