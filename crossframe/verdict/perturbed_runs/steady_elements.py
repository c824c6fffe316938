"""Tracks which elements of parameters are steady, so that their updates can be judged.

[Note: unsteady elements] An optimizer that divides a gradient by its magnitude turns a gradient near zero into a full step with
an arbitrary sign, whatever the spread of the perturbed runs. So an update is judged by its steady elements: those whose gradient
exceeded its rounding, or was exactly zero, in both recordings at every step so far, without the few that differ most
(`trimmed_distance`). Once a step was not recorded, the steady elements are unknown, and updates are judged by the half of their
elements that differ least (`inner_distance`).
"""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from crossframe.recording.event_format import REDUCE, UPDATE
from crossframe.verdict.measure.quantities import Quantity, finite


class Steady:
    """Tracks which elements of parameters are steady during a comparison. See [Note: unsteady elements]."""

    def __init__(self, limit: Callable[[Quantity], float | None] | None) -> None:
        """`limit` bounds reduced gradients; None: all elements are steady."""
        self._limit = limit
        self._unsteady: dict[str, np.ndarray] = {}

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
            self._unsteady[name] = small | self._unsteady.get(name, False)

    def num_unsteady(self, parameter: str) -> int:
        return int(np.sum(self._unsteady.get(parameter, 0)))

    def of(self, quantity: Quantity) -> Quantity:
        """Return an update with its unsteady elements replaced by those of the first recording.

        Returns other quantities unchanged, and also late updates: their inner half must not consist of replaced elements.
        """
        unsteady = self._unsteady.get(quantity.parameter)
        if quantity.kind != UPDATE or unsteady is None or quantity.sketched:
            return quantity
        hides = unsteady & np.isfinite(quantity.b.astype(np.float64))
        return replace(quantity, b=np.where(hides, quantity.a, quantity.b))
