"""Tracks which elements of parameters are steady, so that their updates can be judged.

[Note: unsteady elements] An optimizer that divides a gradient by its magnitude turns a gradient near zero into a full step with
an arbitrary sign, whatever the spread of the perturbed runs. So an update is judged by its steady elements: those whose gradient
exceeded its rounding, or was exactly zero, in both recordings at every step so far, without the few that differ most
(`trimmed_distance`). What was unsteady in a perturbed run is so in a comparison too, since the spread of updates does not contain
it: a gradient that is exactly zero in the run may not be so in its perturbed runs. Once a step was not recorded, the steady
elements are unknown, and updates are judged by the half of their elements that differ least (`inner_distance`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from crossframe.recording.event_format import REDUCE, UPDATE
from crossframe.verdict.measure.quantities import Quantity, finite

Since = Mapping[str, np.ndarray]
"""By parameter, the step at which each element became unsteady, or `NEVER`."""
NEVER = np.iinfo(np.int64).max


class Steady:
    """Tracks which elements of parameters are steady during a comparison. See [Note: unsteady elements].

    Attributes:
        since: what became unsteady in this comparison.
    """

    def __init__(self, limit: Callable[[Quantity], float | None] | None, known: Sequence[Since] = ()) -> None:
        """
        Args:
            limit: bounds reduced gradients; None: all elements are steady.
            known: what became unsteady in perturbed runs.
        """
        self._limit, self._known = limit, known
        self.since: dict[str, np.ndarray] = {}

    def note(self, group: list[Quantity]) -> None:
        """Update the steady elements from a group of reduced gradients; ignores other groups."""
        if self._limit is None or group[0].phase != REDUCE or group[0].sketched:
            return
        limit, name = self._limit(group[0]), group[0].parameter
        if limit is None:
            return
        element = limit / math.sqrt(group[0].a.size)
        for quantity in group:
            a, b = finite(quantity.a), finite(quantity.b)
            # Exact zeros, such as rows of an embedding that were not looked up, are not rounding and stay steady.
            small = ((np.abs(a) <= element) | (np.abs(b) <= element)) & ((a != 0) | (b != 0))
            found = np.where(small, quantity.step, NEVER)
            self.since[name] = np.minimum(found, self.since.get(name, NEVER))

    def num_unsteady(self, quantity: Quantity) -> int:
        """The number of elements of an update that are not judged."""
        return int(np.sum(self._unsteady(quantity)))

    def _unsteady(self, quantity: Quantity) -> np.ndarray | bool:
        """Which elements of an update became unsteady at its step or before."""
        name, shape = quantity.parameter, np.shape(quantity.a)
        found = [each[name] for each in (self.since, *self._known) if name in each]
        return np.logical_or.reduce([each <= quantity.step for each in found if each.shape == shape] or [False])

    def of(self, quantity: Quantity) -> Quantity:
        """Return an update with its unsteady elements replaced by those of the first recording.

        Returns other quantities unchanged, and also late updates: their inner half must not consist of replaced elements.
        """
        if quantity.kind != UPDATE or quantity.sketched or not np.any(unsteady := self._unsteady(quantity)):
            return quantity
        hides = unsteady & np.isfinite(quantity.b.astype(np.float64))
        return replace(quantity, b=np.where(hides, quantity.a, quantity.b))
