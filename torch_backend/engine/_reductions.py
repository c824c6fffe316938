"""The reductions of a backward: which unit's comes when.

[Note: order of reductions] Every rank must issue the same reductions in the same order, also where ranks leave different
parameters unused and autograd reaches the units in other orders (R29). A unit therefore waits, once it is done, for
those units that began their forward after it and are in their backward; what is left is reduced at the end in that same order.
Units that count what is unused as zeros are waited for wherever they are: on another rank they may have been reached.
"""

from collections import deque
from collections.abc import Iterable

from crossframe.lifecycle import Activity
from torch_backend.engine._unit import Unit


class Reductions:
    """What of a backward's reductions is done, under way and to come."""

    def __init__(self) -> None:
        # Units that were begun and are not reduced yet, the last one first; and those of them whose backward is done.
        self.waiting: list[Unit] = []
        self._done: set[Unit] = set()
        # Units whose reduction is under way, the oldest first; and all that were reduced in this backward.
        self._under_way: deque[Unit] = deque()
        self._issued: set[Unit] = set()

    def begin(self, begun: Iterable[Unit]) -> None:
        """A backward begins.

        Args:
            begun: the units that have run since the last one, the last one first.
        """
        self.waiting = list(begun)

    def done(self, unit: Unit) -> None:
        """All gradients of a unit are there: reduce them as soon as it is its turn."""
        self._done.add(unit)
        if unit not in self.waiting:  # it ran in an earlier step of several that share one backward
            self.waiting.insert(0, unit)
        for first in list(self.waiting):
            if not self._done:
                return
            if first in self._done:
                self._done.discard(first)
                self.waiting.remove(first)
                self.issue(first)
            elif first.trained and (first.state.activity == Activity.BACKWARD or first.choices.reduces_unused):
                return

    def issue(self, unit: Unit) -> None:
        """Reduce a unit's gradients, if it has any or zeros count as some."""
        fills_up = unit.choices.reduces_unused and unit.trained and unit not in self._issued
        if unit.has_grads or fills_up:
            self._issued.add(unit)
            self.advance()
            unit.start_reduction()
            self._under_way.append(unit)

    def advance(self) -> None:
        """Take every reduction that is under way one collective further, the oldest first: in one order on all ranks."""
        for _ in range(len(self._under_way)):
            unit = self._under_way.popleft()
            if not unit.advance_reduction():
                self._under_way.append(unit)

    def finish(self) -> None:
        """Go on until nothing is under way."""
        while self._under_way:
            self.advance()

    def clear(self) -> None:
        """The backward is over, or was left."""
        self.waiting = []
        for some in (self._done, self._issued, self._under_way):
            some.clear()
