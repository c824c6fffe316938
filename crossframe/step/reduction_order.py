"""The order in which units are reduced in one backward: the same on all ranks (R29).

[Note: order of reductions] All ranks must issue the same reductions in the same order, even if ranks leave different parameters
unused and autograd reaches units in different orders. So a unit whose gradients are complete waits for the units that began
their forward after it and are in backward. Remaining units are reduced at the end of backward, in the same order. Units whose
unused parameters count as zeros are always waited for, because another rank may have used them. They count in the backward of a
loss of the whole model, and not where only outputs of single modules of list units have gradients, as those of a head that the
script calls on chunks: there the same units are left for a later backward on all ranks.
"""

import itertools
from collections.abc import Iterable, Iterator

from crossframe.lifecycle import Activity
from crossframe.step.unit import UnitStep


class ReductionOrder:
    """The units of one backward that are still to be reduced. See [Note: order of reductions]."""

    def __init__(self) -> None:
        # Units that have begun and are not reduced, the last one first; those of them whose gradients are complete; and those
        # that were reduced.
        self._waiting: list[UnitStep] = []
        self._complete: set[UnitStep] = set()
        self._reduced: set[UnitStep] = set()
        self._counts_unused = False

    def begin(self, begun: Iterable[UnitStep]) -> None:
        """A backward begins, after forwards of these units, in the order in which they began."""
        self._waiting = list(begun)[::-1]

    def reach_output(self, *, whole: bool) -> None:
        """An output has a gradient, of a whole unit or of some of its modules."""
        self._counts_unused |= whole

    def clear(self) -> None:
        """The backward has ended."""
        self._counts_unused = False
        self._waiting = []
        self._complete.clear()
        self._reduced.clear()

    def complete(self, unit: UnitStep) -> Iterator[UnitStep]:
        """All gradients of a unit are available. Yields the units whose turn has come."""
        self._complete.add(unit)
        if unit not in self._waiting:  # it ran in an earlier step of several that share one backward
            self._waiting.insert(0, unit)
        for first in list(self._waiting):
            if not self._complete:
                return
            if first in self._complete:
                self._complete.discard(first)
                self._waiting.remove(first)
                if self._counts(first):
                    yield first
            elif first.trained and (first.state.activity == Activity.BACKWARD or first.settings.reduce_unused):
                return

    def at_end(self, units: Iterable[UnitStep]) -> Iterator[tuple[UnitStep, bool]]:
        """At the end of backward, (unit, whether to reduce it) of all units that were not in a forward.

        Args:
            units: all units, the last ones first.
        """
        waiting = dict.fromkeys(self._waiting)
        for unit in itertools.chain(waiting, (unit for unit in units if unit not in waiting)):
            if unit.state.activity != Activity.FORWARD:  # it runs this backward inside its forward
                yield unit, unit.settings.reduce_grads and self._counts(unit, unused=self._counts_unused)

    def _counts(self, unit: UnitStep, *, unused: bool = True) -> bool:
        """Whether a unit has gradients to reduce, or missing ones that count as zeros."""
        zeros = unused and unit.settings.reduce_unused and unit.trained and unit not in self._reduced
        if unit.has_grads or zeros:
            self._reduced.add(unit)
            return True
        return False
