"""Finds a loss that leaves the run's own past.

[Note: levels of the loss] The last m losses are compared with k earlier ones. If their order were random, all of the last m would
exceed all of the k others with a probability of 1 / C(k + m, m), whatever their distribution is. m is the smallest number for
which this is at most `RATE`. A falling loss makes it less likely. A spike of fewer than six steps never does it, since m is at
least 6. Two more conditions exclude what is significant but does not matter:

- The last losses are at least twice as far above the median of the others as the largest of these: a drift is no jump.
- They undo at least `MIN_LOST_SHARE` of the progress since the start of training.

The k others are the losses before the last m, at most `MAX_EARLIER_LOSSES`, or the first ones of the run: a loss that stays above
the level of the untrained model has diverged, however slowly.
"""

import itertools
import math
from collections import deque
from collections.abc import Iterable
from functools import cache

import numpy as np

RATE = 1e-8
"""The probability of an alarm per step: 1e-3 in a run of 100,000 steps."""
MAX_EARLIER_LOSSES = 64
"""Number of earlier losses that a jump is compared with."""
MIN_LOST_SHARE = 0.05
"""A choice: a jump of less is left to whoever reads the curve."""
MIN_JUMP = 2.0


@cache
def num_recent(num_earlier: int) -> int:
    """The smallest number of losses that must all exceed this many earlier ones. See [Note: levels of the loss].

    >>> num_recent(64), num_recent(15)
    (6, 15)
    """
    return next(count for count in itertools.count() if math.comb(num_earlier + count, count) * RATE >= 1)


NUM_FIRST_LOSSES = 15
"""The number of losses that state the level at the start: the smallest that as many others can exceed significantly."""


class LossRule:
    """Judges a series of losses, one at a time."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=MAX_EARLIER_LOSSES + num_recent(MAX_EARLIER_LOSSES))
        self._first: list[float] = []
        self._level: deque[float] = deque(maxlen=num_recent(NUM_FIRST_LOSSES))
        self._lowest = math.inf

    def add(self, loss: float) -> str:
        """Add a loss; returns what is wrong, as a clause, or "". Losses that are not finite are left to another rule."""
        if not math.isfinite(loss):
            self._losses.clear()
            self._level.clear()
            return ""
        self._losses.append(loss)
        if len(self._first) < NUM_FIRST_LOSSES:
            self._first.append(loss)
        else:
            self._level.append(loss)
        if len(self._level) == num_recent(NUM_FIRST_LOSSES):
            self._lowest = min(self._lowest, float(np.median(self._level)))
        return self._jump() or self._above_start()

    def _jump(self) -> str:
        num = len(self._losses)
        earlier = next((k for k in range(MAX_EARLIER_LOSSES, NUM_FIRST_LOSSES, -1) if k + num_recent(k) <= num), 0)
        if not earlier:
            return ""
        losses = list(self._losses)
        recent = num_recent(earlier)
        before, last = losses[-recent - earlier : -recent], losses[-recent:]
        lost = min(last) - float(np.median(before))
        if not _is_above(last, before) or lost < MIN_LOST_SHARE * self._gained():
            return ""
        return (
            f"the loss jumped: the last {recent} values, {min(last):.4g} or more, all exceed the {earlier} before them, which "
            f"are at most {max(before):.4g}"
        )

    def _above_start(self) -> str:
        if len(self._level) < num_recent(NUM_FIRST_LOSSES) or not _is_above(self._level, self._first):
            return ""
        return (
            f"the loss has diverged: the last {len(self._level)} values, {min(self._level):.4g} or more, all exceed the first "
            f"{len(self._first)} of the run, which are at most {max(self._first):.4g}"
        )

    def _gained(self) -> float:
        """What training has gained since its start."""
        return max(float(np.median(self._first)) - self._lowest, 0.0)


def _is_above(last: Iterable[float], before: list[float]) -> bool:
    lowest, highest, middle = min(last), max(before), float(np.median(before))
    return lowest > highest and lowest - middle >= MIN_JUMP * (highest - middle)
