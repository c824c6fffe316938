"""`Monitor`: alarms while a training loop is recorded, and what follows from them."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from crossframe.errors import UsageError
from crossframe.monitoring.alarm import Alarm, Kind
from crossframe.monitoring.baseline import BaselineRule
from crossframe.monitoring.follow import Follower
from crossframe.monitoring.scalars import scalar_writer

logger = logging.getLogger("crossframe.monitor")


class Monitor:
    """Watches a run while a `Recorder` records it.

        with Recorder("runs/mine", model=model, monitor=Monitor(checkpoint=save)) as recorder:
            ...

    Every `every` steps, and after each recorded one, the first rank reads what all ranks have written to the recording since, and
    judges it: values that are not finite, ranks that disagree, a loss that leaves its past, gradients of units that vanish or
    explode, parameters that moved as the optimizer does not move them, and a run that leaves the spread of its baseline. What is
    judged is what `crossframe watch` judges.

    On an alarm, the first rank logs a warning to the logger "crossframe.monitor" and calls the callbacks. On the first alarm of
    each kind, all ranks then record the next steps densely, and keep a checkpoint.

    Args:
        baseline: a golden, or a recording with perturbed runs, of the same training.
        every: number of steps between judgements.
        window: number of steps that are recorded densely after the first alarm of each kind; 0: none.
        checkpoint: called with the number of completed steps, on all ranks at the same step, after the first alarm of each kind.
        on_alarm: a function of an alarm, or several. Its errors are logged.
        writer: a `SummaryWriter`, or a run of W&B, which gets the numbers of each step.

    Attributes:
        alarms: all alarms so far, on the first rank.

    Raises:
        UsageError: an invalid argument, or a baseline without perturbed runs.
        RecordingError: the baseline is missing or damaged.
    """

    def __init__(
        self,
        *,
        baseline: str | Path | None = None,
        every: int = 16,
        window: int = 4,
        checkpoint: Callable[[int], Any] | None = None,
        on_alarm: Callable[[Alarm], Any] | Iterable[Callable[[Alarm], Any]] = (),
        writer: Any = None,
    ) -> None:
        for name, value, least in (("every", every, 1), ("window", window, 0)):
            if type(value) is not int or value < least:
                raise UsageError(f"Monitor: {name}: expected an int of at least {least}, got {value!r}")
        self._callbacks = (on_alarm,) if callable(on_alarm) else tuple(on_alarm)
        if not all(map(callable, self._callbacks)) or not (checkpoint is None or callable(checkpoint)):
            raise UsageError("Monitor: on_alarm and checkpoint: expected functions")
        self._baseline = None if baseline is None else BaselineRule(baseline)
        self.every, self.window, self._checkpoint = every, window, checkpoint
        self._write = None if writer is None else scalar_writer(writer)
        self._follower: Follower | None = None
        self._kinds: set[Kind] = set()
        self._failed = False
        self.alarms: list[Alarm] = []

    def is_due(self, step: int, *, recorded: bool) -> bool:
        """Whether all ranks judge the run at the end of this step."""
        return recorded or (step + 1) % self.every == 0

    def begin(self, directory: str | Path) -> None:
        """Follow a recording that exists. Called by the Recorder on the first rank."""
        self._follower = Follower(directory, self._baseline)

    def judge(self) -> bool:
        """Judge what was written since the previous call; returns whether an alarm of a new kind was raised.

        An error is logged, and ends the monitoring instead of the training.
        """
        if self._follower is None or self._failed:
            return False
        try:
            alarms, scalars = self._follower.advance()
            if self._write is not None:
                for numbers in scalars:
                    so_far = sum(alarm.step <= numbers.step for alarm in self._follower.alarms)
                    self._write(numbers, so_far)
        except Exception:
            self._failed = True
            logger.exception("the run is no longer monitored")
            return False
        for alarm in alarms:
            self._report(alarm)
        is_new = bool({alarm.kind for alarm in alarms} - self._kinds)
        self._kinds |= {alarm.kind for alarm in alarms}
        self.alarms += alarms
        return is_new

    def save_checkpoint(self, num_steps: int) -> None:
        """Keep a checkpoint, if the user told how. Called by the Recorder on all ranks."""
        if self._checkpoint is not None:
            self._checkpoint(num_steps)

    def _report(self, alarm: Alarm) -> None:
        logger.warning("%s", alarm.describe())
        for callback in self._callbacks:
            try:
                callback(alarm)
            except Exception:
                logger.exception("on_alarm failed")
