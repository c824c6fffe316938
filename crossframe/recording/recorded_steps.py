"""The schedule of a recording: the steps whose tensors are recorded."""

from collections.abc import Iterable
from dataclasses import dataclass

from crossframe.errors import RecordingError, UsageError
from crossframe.quoting import quote


@dataclass(frozen=True)
class Schedule:
    """The steps whose tensors are recorded: the first `dense` steps, every `every`-th step, the last step if known, and windows.

    Attributes:
        windows: further dense steps, as (start, stop).
    """

    dense: int
    every: int
    windows: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("dense", 0), ("every", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise RecordingError(
                    f"manifest field 'schedule.{name}': expected an int of at least {least}, got {value!r}"
                )
        for window in self.windows:
            if (
                not isinstance(window, tuple)
                or len(window) != 2
                or not all(type(x) is int for x in window)
                or not 0 <= window[0] < window[1]
            ):
                raise RecordingError(
                    f"manifest field 'schedule.windows': expected (start, stop) of steps, as in (500, 510), got {window!r}"
                )

    def records(self, step: int, steps: int | None) -> bool:
        """Whether tensors of this step are recorded in a run of `steps` steps; None: the number is unknown.

        >>> [step for step in range(10) if Schedule(dense=2, every=4, windows=((6, 7),)).records(step, 10)]
        [0, 1, 4, 6, 8, 9]
        """
        return self.is_dense(step) or step % self.every == 0 or (steps is not None and step == steps - 1)

    def is_dense(self, step: int) -> bool:
        """Whether tensors that are specific to a rank are recorded too: activations, unsharded parameters and unreduced
        gradients. These are by far the largest part of a recording."""
        return step < self.dense or any(start <= step < stop for start, stop in self.windows)


def window_of(text: str) -> tuple[int, int]:
    """Parse a window of steps, such as "500:510".

    Raises:
        UsageError: another format.

    >>> window_of("500:510")
    (500, 510)
    """
    start, colon, stop = text.partition(":")
    numbers = all(each.isdecimal() and len(each) <= 12 for each in (start, stop))
    if not (colon and numbers and int(start) < int(stop)):
        raise UsageError(
            f"window: expected the first step and the one after the last, as in 500:510, got {quote(text)}"
        )
    return int(start), int(stop)


def window_arguments(windows: Iterable[tuple[int, int]]) -> list[str]:
    """The command-line arguments of windows.

    >>> window_arguments([(500, 510)])
    ['--window', '500:510']
    """
    return [part for start, stop in windows for part in ("--window", f"{start}:{stop}")]
