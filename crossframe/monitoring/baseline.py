"""Compares a run with a baseline while it is being written: with the spread of the baseline's perturbed runs."""

from pathlib import Path

from crossframe.errors import UsageError
from crossframe.recording import Recording
from crossframe.verdict import Verdict, compare


class BaselineRule:
    """Compares the first steps of a run with a baseline, a golden or a recording with perturbed runs.

    The comparison is that of `crossframe compare`. It is made at the first step, whenever the number of steps has doubled, and at
    the last step of the baseline, so that all together take at most about twice as long as the last one.

    Args:
        path: of the baseline.

    Raises:
        RecordingError: the baseline is missing or damaged.
        UsageError: it has no perturbed runs.
    """

    def __init__(self, path: str | Path) -> None:
        self._baseline = Recording.open(path)
        if self._baseline.stored_spread is None and not self._baseline.perturbed_runs():
            raise UsageError(
                f"baseline: expected a golden, or a recording with perturbed runs, which measure rounding; {path} has none: "
                "record it with --perturbed-runs 4, or use crossframe baseline record"
            )
        self.num_steps = self._baseline.num_steps
        self._compared = 0

    def add(self, recording: Recording) -> tuple[int, str, str]:
        """Compare the steps so far, if it is time.

        Returns:
            The step that first leaves the spread, what is outside of it, or "", and a note, or "".

        Raises:
            RecordingError: a tensor is damaged.
        """
        num_steps = min(recording.num_steps, self.num_steps)
        if num_steps == self._compared or self.num_steps > num_steps < 2 * self._compared:
            return 0, "", ""
        self._compared = num_steps
        found = compare(self._baseline, recording.first(num_steps), bitwise=False)
        if found.verdict is Verdict.BUG:
            self._compared = self.num_steps
            step = found.first_divergence.step if found.first_divergence else num_steps - 1
            return (
                step,
                f"the run leaves the spread of its baseline {self._baseline.directory.name}: {found.reason}",
                "",
            )
        if found.verdict is Verdict.INCOMPARABLE:
            self._compared = self.num_steps
            return 0, "", f"the run is not compared with its baseline {self._baseline.directory.name}: {found.reason}"
        return 0, "", ""
