"""Prefetching (R16): the units to gather before they are needed, in forward and in backward, from the order of the step."""

import itertools
from collections.abc import Sequence

from crossframe.step.unit import UnitStep
from crossframe.strategy import Prefetch


class Prefetching:
    """The order in which units run, and the units to prefetch when one of them begins or ends.

    A unit that runs several times in a step has the position of its first run.
    """

    def __init__(self) -> None:
        # Units in the order in which their forwards began, and ended; and the unit that began after each in the step before.
        self.begun: dict[UnitStep, None] = {}
        self._ended: dict[UnitStep, int] = {}
        self._next: dict[UnitStep, UnitStep] = {}
        # Units whose last output needs no gradient, so that no backward reaches them.
        self._without_backward: set[UnitStep] = set()
        # During a backward: the units in the order in which their forwards ended.
        self._order: list[UnitStep] = []

    def begin_step(self) -> None:
        """A step begins: it is expected to run units in the order of the step before."""
        if self.begun:
            self._next = dict(itertools.pairwise(self.begun))
        self.clear()

    def clear(self) -> None:
        """Forget the order of this step; a backward that is running keeps its own."""
        self.begun.clear()
        self._ended.clear()
        self._without_backward.clear()

    def forward_begun(self, unit: UnitStep) -> None:
        """The forward of a unit began."""
        self.begun.setdefault(unit)

    def forward_ended(self, unit: UnitStep) -> None:
        """The forward of a unit ended."""
        self._ended.setdefault(unit, len(self._ended))

    def needs_no_backward(self, unit: UnitStep) -> None:
        """No backward will reach a unit."""
        self._without_backward.add(unit)

    def backward_begun(self) -> None:
        """The backward of the step began."""
        self._order = list(self._ended)

    def in_forward(self, unit: UnitStep) -> Sequence[UnitStep]:
        """The units to prefetch when the forward of `unit` begins: the next one of the previous step, then the user's."""
        following = self._next.get(unit) if unit.settings.forward_prefetch else None
        return unit.forward_prefetch_units if following is None else [following, *unit.forward_prefetch_units]

    def in_backward(self, unit: UnitStep, moment: Prefetch) -> Sequence[UnitStep]:
        """The units to prefetch when the backward of `unit` begins (BACKWARD_PRE) or has ended (BACKWARD_POST).

        These are the user's, at the beginning, or the unit whose forward ended before this one's.
        """
        if unit.backward_prefetch_units and moment is Prefetch.BACKWARD_PRE:
            return unit.backward_prefetch_units
        position = self._ended.get(unit, 0)
        if unit.settings.backward_prefetch is not moment or position == 0:
            return ()
        before = self._order[position - 1]
        return () if before in self._without_backward else (before,)
