"""Rate limiter (`limit_all_gathers`): bounds the unsharded units whose memory is still in use, by blocking the host."""

from collections import deque
from typing import Any

MAX_IN_USE = 1


class RateLimiter:
    """Before an all-gather, blocks the host until at most `MAX_IN_USE` freed units are still in use on the device."""

    def __init__(self) -> None:
        self._frees: deque[Any] = deque()

    def freed(self, event: Any) -> None:
        """A unit was freed; `event` is the point of the computing stream at which its memory is no longer in use."""
        self._frees.append(event)

    def wait(self) -> None:
        """Block the host until enough freed units are no longer in use."""
        while len(self._frees) > MAX_IN_USE:
            self._frees.popleft().synchronize()
