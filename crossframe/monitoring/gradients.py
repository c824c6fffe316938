"""Finds units whose gradient vanishes or explodes, from the reduced gradients of recorded steps.

- *Explodes*: the norm is `EXPLOSION` times the largest of all earlier recorded steps, of which there are at least
  `MIN_PAST_STEPS`. In a healthy run gradients have spikes of about ten times their usual norm; the factor is ten times that.
- *Vanishes*: at two recorded steps in a row, the gradient is zero although it was not before; or its share of the norm of all
  gradients is `VANISHING` of its median share in the past, and its norm less than `FALLEN_NORM` of its median. The share, because
  all gradients vanish together where a loss reaches its minimum; the norm, because a share falls where another unit explodes.
  Two steps, because a unit may be unused in one.
- *Vanishes* under Adam: at two recorded steps in a row, the root mean square of its elements is below the optimizer's epsilon,
  which then reduces the step of an average element to less than half, while that of another unit is `MUCH_LARGER` times epsilon.

A unit that never had a gradient, such as a frozen one, has not vanished. If a unit no longer has one, it counts as zero: the unit
was detached from the loss, or frozen in the middle of training.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

EXPLOSION = 100.0
VANISHING = 1e-3
FALLEN_NORM = 0.1
MUCH_LARGER = 1e3
MIN_PAST_STEPS = 5
_REMEMBERED = 64


@dataclass
class _Past:
    """The recorded steps of a unit so far."""

    largest: float = 0.0
    num: int = 0
    shares: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    vanished_before: bool = False


class GradientRule:
    """Judges the gradients of units, one recorded step at a time.

    Args:
        epsilon: that of Adam or AdamW; None: unknown, or another optimizer.
    """

    def __init__(self, epsilon: float | None) -> None:
        self._epsilon = epsilon
        self._past: dict[str, _Past] = {}

    def add(self, units: Mapping[str, tuple[float, int]]) -> dict[str, str]:
        """Add a step; returns what is wrong, as a clause, by unit.

        Args:
            units: (norm, number of elements) of the gradient of each unit that has one.
        """
        found: dict[str, str] = {}
        total = math.sqrt(sum(norm**2 for norm, _ in units.values()))
        if not math.isfinite(total) or not total:
            return found
        absent = [unit for unit in self._past if unit not in units]
        units = {**units, **dict.fromkeys(absent, (0.0, 1))}
        sizes = {unit: norm / math.sqrt(max(numel, 1)) for unit, (norm, numel) in units.items()}
        for unit, (norm, _) in units.items():
            past = self._past.setdefault(unit, _Past())
            if past.num >= MIN_PAST_STEPS and norm >= EXPLOSION * past.largest:
                found[unit] = (
                    f"explodes: its norm is {norm:.3g}, {norm / past.largest:.3g} times the largest of {past.num} earlier steps"
                )
            vanishes = self._vanishes(past, norm, norm / total, sizes[unit], max(sizes.values()))
            if vanishes and past.vanished_before:
                found[unit] = "vanishes: the unit no longer has one" if unit in absent else vanishes
            past.vanished_before = bool(vanishes)
            if norm:
                past.largest, past.num = max(past.largest, norm), past.num + 1
            if not vanishes:
                past.shares.append(norm / total)
                past.norms.append(norm)
        return found

    def _vanishes(self, past: _Past, norm: float, share: float, size: float, largest: float) -> str:
        if not size:
            return "vanishes: it is exactly zero" if past.num else ""
        usual = median(past.shares) if len(past.shares) >= MIN_PAST_STEPS else 0.0
        if share < VANISHING * usual and norm < FALLEN_NORM * median(past.norms):
            return f"vanishes: it is {share:.2g} of the norm of all gradients, and usually {usual:.2g}"
        if self._epsilon and size < self._epsilon and largest > MUCH_LARGER * self._epsilon:
            return (
                f"vanishes: the root mean square of its elements is {size:.2g}, less than the optimizer's epsilon of "
                f"{self._epsilon:g}, and {largest:.2g} in another unit"
            )
        return ""
